"""What a run left on the machine: looked up from outside, never taken from the driver's word."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import docker

_COMMANDS = ("openshell-sandbox", "openshell-supervisor", "openshell-gateway", "openshell-driver-docker")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Everything on an engine and of our commands at one moment."""

    containers: frozenset[str]
    volumes: frozenset[str]
    networks: frozenset[str]
    processes: frozenset[str]

    @classmethod
    def take(cls, engine: docker.APIClient) -> Inventory:
        """Look at the engine and at the process table."""
        return cls(
            containers=frozenset(row["Names"][0].lstrip("/") for row in engine.containers(all=True)),
            volumes=frozenset(row["Name"] for row in engine.volumes()["Volumes"] or ()),
            networks=frozenset(row["Name"] for row in engine.networks()),
            processes=frozenset(_our_processes()),
        )

    def left_since(self, before: Inventory, state: Path) -> LeftOver:
        """What is here now and was not before, and what still lies in the state folder."""
        return LeftOver(
            containers=sorted(self.containers - before.containers),
            volumes=sorted(self.volumes - before.volumes),
            networks=sorted(self.networks - before.networks),
            state=sorted(str(path.relative_to(state)) for path in state.rglob("*")) if state.exists() else [],
            processes=sorted(self.processes - before.processes),
        )


def _our_processes() -> list[str]:
    found: list[str] = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it ended while we looked
        name = next((name for name in _COMMANDS for word in words if Path(word).name == name), None)
        if name is not None:
            found.append(f"{name} (pid {folder.name})")
    return found


def remove_earlier(engine: docker.APIClient, namespace: str) -> list[str]:
    """Remove what a killed earlier run left under the same namespace label, and name it."""
    wanted = {"label": f"openshell.ai/sandbox-namespace={namespace}"}
    removed: list[str] = []
    for row in engine.containers(all=True, filters=wanted):
        engine.remove_container(row["Id"], force=True, v=True)
        removed.append(row["Names"][0].lstrip("/"))
    for row in engine.volumes(filters=wanted)["Volumes"] or ():
        engine.remove_volume(row["Name"])
        removed.append(row["Name"])
    return removed
