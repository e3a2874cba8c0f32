"""What a run left on the machine: looked up from outside, never taken from the driver's word.

Other people's containers and processes may come and go meanwhile. Ours are known by the namespace label, or by a name
of ours without any such label; processes by the run's own folder in their environment or by the container they ran in.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import docker

NAMESPACE_LABEL = "openshell.ai/sandbox-namespace"
KEPT_ON_PURPOSE = (".driver-owner", ".made-state-dir", "exits.jsonl")
"""The driver's identity, its word on who made the folder, and its bounded journal of verdicts outlive sandboxes:
``openshell-driver-docker exits``."""
END_SECONDS = 10.0
OWN_NAMES = ("openshell-channel-", "openshell-supervisor-", "openshell-runtime-", "openshell-default--")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOver:
    """Names of things that are still there; all empty when nothing was left."""

    containers: list[str]
    volumes: list[str]
    networks: list[str]
    state: list[str]
    processes: list[str]

    @property
    def nothing(self) -> bool:
        """Whether nothing was left."""
        return not any(asdict(self).values())


@dataclass(slots=True)
class Inventory:
    """Everything of ours that a run made, and what was there before."""

    engine: docker.APIClient
    namespace: str
    root: Path
    """Folder of this run: every process of the run has it in its environment."""
    state: Path
    """Where driver and commands keep what must outlive them."""
    before: dict[str, frozenset[str]] = field(default_factory=dict)
    container_ids: set[str] = field(default_factory=set)

    def begin(self) -> None:
        """Remember what is here already."""
        self.before = {kind: frozenset(names) for kind, names in self._here().items()}

    def note_containers(self) -> None:
        """Remember the containers that run now, to look for their processes later."""
        wanted = {"label": f"{NAMESPACE_LABEL}={self.namespace}"}
        self.container_ids |= {row["Id"] for row in self.engine.containers(all=True, filters=wanted)}

    def left(self) -> LeftOver:
        """What is here now and was not before."""
        found = {kind: sorted(set(names) - self.before.get(kind, frozenset())) for kind, names in self._here().items()}
        return LeftOver(
            containers=found["containers"],
            volumes=found["volumes"],
            networks=found["networks"],
            state=sorted(
                str(path.relative_to(self.state))
                for path in self.state.rglob("*")
                if path.name not in KEPT_ON_PURPOSE and (path.is_file() or not any(path.iterdir()))
            ),
            processes=sorted(self._processes()),
        )

    def _here(self) -> dict[str, list[str]]:
        containers = [(_name(row), row["Labels"]) for row in self.engine.containers(all=True)]
        volumes = [(row["Name"], row["Labels"]) for row in self.engine.volumes()["Volumes"] or ()]
        networks = [(row["Name"], row["Labels"]) for row in self.engine.networks()]
        kinds = {"containers": containers, "volumes": volumes, "networks": networks}
        return {kind: [name for name, labels in rows if self._ours(name, labels)] for kind, rows in kinds.items()}

    def _ours(self, name: str, labels: Mapping[str, str] | None) -> bool:
        namespace = (labels or {}).get(NAMESPACE_LABEL)
        return namespace == self.namespace or (namespace is None and name.startswith(OWN_NAMES))

    def _processes(self) -> Iterator[str]:
        marker = str(self.root).encode()
        for pid, environment in _environments():
            try:
                groups = Path(f"/proc/{pid}/cgroup").read_text()
                name = Path(f"/proc/{pid}/comm").read_text().strip()
            except OSError:
                continue  # it ended while we looked
            if marker in environment or any(one in groups for one in self.container_ids):
                yield f"{name} (pid {pid})"


def _environments() -> Iterator[tuple[int, bytes]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it ended while we looked, or is not ours to see
                yield int(folder.name), (folder / "environ").read_bytes()


def _name(row: Mapping[str, Any]) -> str:
    """A container's name; its id where the engine lists it without one, as it does while it removes it."""
    names = row["Names"] or [row["Id"]]
    return str(names[0]).lstrip("/")


def remove_earlier(engine: docker.APIClient, namespace: str) -> list[str]:
    """Remove what a killed earlier run left under the same namespace label, and name it."""
    wanted = {"label": f"{NAMESPACE_LABEL}={namespace}"}
    removed: list[str] = []
    for row in engine.containers(all=True, filters=wanted):
        engine.remove_container(row["Id"], force=True, v=True)
        removed.append(_name(row))
    for row in engine.volumes(filters=wanted)["Volumes"] or ():
        engine.remove_volume(row["Name"])
        removed.append(row["Name"])
    return removed


def remove_folders(parent: Path, prefix: str) -> list[str]:
    """Remove the folders of killed earlier runs, and name them: those of this user that no run holds, and no link."""
    removed: list[str] = []
    for folder in sorted(parent.glob(f"{prefix}*")):
        if folder.is_symlink() or not folder.is_dir() or folder.lstat().st_uid != os.getuid():
            continue
        with contextlib.suppress(BlockingIOError), held_folder(folder):
            _await_end(str(folder).encode())
            shutil.rmtree(folder)
            removed.append(str(folder))
    return removed


@contextlib.contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """Hold a folder as this run's; no death of a process leaves it held.

    Raises:
        BlockingIOError: Another run holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _await_end(marker: bytes) -> None:
    """Wait for the commands of a killed run, which the kernel told to end with it; kill what does not."""
    for pid in [pid for pid, environment in _environments() if marker in environment]:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            try:
                ended = select.poll()
                ended.register(handle, select.POLLIN)
                if not ended.poll(END_SECONDS * 1000):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    ended.poll(END_SECONDS * 1000)
            finally:
                os.close(handle)
