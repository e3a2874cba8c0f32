"""The two acts of the demo: a supervisor that is killed, and one that cannot reach its gateway."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from openshell import Goal, OpenShell, WatchEvent
from openshell.errors import OpenShellError, SandboxFailedError
from openshell.verdicts import Component, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    import docker

EVENT_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one sandbox of the demo ended."""

    name: str
    phase: str
    reason: str
    message: str
    verdict: Verdict | None
    created_to_ready_ms: float | None
    exit_to_event_ms: float | None
    engine_wait: dict[str, object] | None = None
    """What the engine's own ``wait`` says of the supervisor."""


class ExitWatcher:
    """Follows a sandbox in a thread and notes when the verdict on its supervisor arrives."""

    def __init__(self, client: OpenShell, name: str) -> None:
        """Start following ``name``."""
        self._watch = client.sandboxes.watch(name, event_tail=64)
        self._arrived = threading.Event()
        self.verdict: Verdict | None = None
        self.seen_at: datetime | None = None
        self._thread = threading.Thread(target=self._follow, name=f"watch-{name}")
        self._thread.start()

    def _follow(self) -> None:
        try:
            for event in self._watch:
                if event.verdict is not None and event.verdict.component is Component.SUPERVISOR:
                    self.seen_at = datetime.now(UTC)
                    self.verdict = event.verdict
                    return
        except OpenShellError:
            return  # the missing verdict is reported by whoever waits
        finally:
            self._arrived.set()

    def wait(self) -> None:
        """Wait until the verdict is there, or the stream ended."""
        self._arrived.wait(EVENT_TIMEOUT_SECONDS)

    def close(self) -> None:
        """Stop following."""
        self._watch.close()
        self._thread.join()

    @property
    def exit_to_event_ms(self) -> float | None:
        """From the end of the process, as the engine recorded it, to the event's arrival here."""
        if self.verdict is None or self.verdict.finished_at is None or self.seen_at is None:
            return None
        return round((self.seen_at - self.verdict.finished_at).total_seconds() * 1000, 1)


def launch_and_kill(
    client: OpenShell, engine: docker.APIClient, *, name: str, image: str, show: Callable[[WatchEvent], None]
) -> Outcome:
    """Launch a sandbox, wait until it is Ready, and kill its supervisor from outside."""
    began = time.monotonic()
    client.sandboxes.create(name, image=image, command=["/bin/sleep", "3600"])
    client.sandboxes.wait(name, Goal.READY, timeout_seconds=120, on_event=show)
    ready_ms = round((time.monotonic() - began) * 1000, 1)
    watcher = ExitWatcher(client, name)
    try:
        wanted = {"label": [f"openshell.ai/sandbox-name={name}", "openshell.ai/isolation-role=supervisor"]}
        supervisor = next(iter(engine.containers(filters=wanted)), None)
        if supervisor is None:
            raise OpenShellError(f"sandbox {name} is Ready, but the engine shows no supervisor of it that runs")
        engine.kill(supervisor["Id"], signal="SIGKILL")
        waited = engine.wait(supervisor["Id"], timeout=int(EVENT_TIMEOUT_SECONDS))
        watcher.wait()
    finally:
        watcher.close()
    return replace(_outcome(client, name, watcher, ready_ms), engine_wait=dict(waited))


def launch_without_road(client: OpenShell, *, name: str, image: str, show: Callable[[WatchEvent], None]) -> Outcome:
    """Launch a sandbox whose supervisor cannot reach its gateway, and let it fail by itself."""
    client.sandboxes.create(name, image=image, command=["/bin/sleep", "3600"])
    watcher = ExitWatcher(client, name)
    try:
        client.sandboxes.wait(name, Goal.READY, timeout_seconds=120, on_event=show)
        raise OpenShellError(f"sandbox {name} became Ready although its supervisor has no way to the gateway")
    except SandboxFailedError:
        watcher.wait()
    finally:
        watcher.close()
    return _outcome(client, name, watcher, None)


def _outcome(client: OpenShell, name: str, watcher: ExitWatcher, ready_ms: float | None) -> Outcome:
    # The event comes first, the phase follows at once; no goal can be reached from it any more.
    with contextlib.suppress(SandboxFailedError):
        client.sandboxes.wait(name, Goal.STOPPED, timeout_seconds=10)
    sandbox = client.sandboxes.get(name)
    status = sandbox.status
    ready = next((one for one in status.conditions if one.type == "Ready"), None) if status else None
    return Outcome(
        name=name,
        phase=str(status.phase).capitalize() if status else "Unknown",
        reason=ready.reason if ready else "",
        message=ready.message if ready else "",
        verdict=watcher.verdict,
        created_to_ready_ms=ready_ms,
        exit_to_event_ms=watcher.exit_to_event_ms,
    )
