"""The stream of one sandbox, as it is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from openshell.v1 import PlatformEvent, Sandbox, SandboxStreamEvent, SandboxStreamWarning
from openshell.verdicts import Verdict

if TYPE_CHECKING:
    from types import TracebackType

    from openshell._calls import ResponseStream


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchEvent:
    """One message of a sandbox's stream: exactly one of the first three is set."""

    sandbox: Sandbox | None = None
    """The sandbox's new state."""
    event: PlatformEvent | None = None
    """Something that happened on the platform, for example a pulled image."""
    warning: SandboxStreamWarning | None = None
    """The gateway says that something was lost; read the sandbox again."""
    cursor: str = ""
    """Place in the stream, to resume after it."""

    @property
    def verdict(self) -> Verdict | None:
        """Why a container ended, when the event says so."""
        return None if self.event is None else Verdict.from_metadata(self.event.metadata)

    @property
    def step(self) -> str:
        """Where a launch stands, in one line; empty when the event does not say (compute-driver contract 4.5)."""
        if self.event is None:
            return ""
        metadata = self.event.metadata
        step = metadata.get("openshell.progress.active_step", "").replace("_", " ")
        detail = metadata.get("openshell.progress.active_detail", "")
        label = metadata.get("openshell.progress.complete_label", "")
        return ": ".join(part for part in (step, detail or label) if part) or self.event.message


class SandboxWatch:
    """An open stream of a sandbox. Iterate it; leaving the ``with`` block or `close` ends it."""

    def __init__(self, stream: ResponseStream[SandboxStreamEvent]) -> None:
        """Wrap the opened stream."""
        self._stream = stream

    def __iter__(self) -> Iterator[WatchEvent]:
        """Yield events until the gateway ends the stream.

        Raises:
            RpcError: The stream ended with a status other than OK.
        """
        for message in self._stream:
            yield WatchEvent(
                sandbox=message.sandbox, event=message.event, warning=message.warning, cursor=message.cursor
            )

    def close(self) -> None:
        """End the stream; safe from any thread and more than once."""
        self._stream.cancel()

    def __enter__(self) -> Self:
        """The watch itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the stream."""
        self.close()
