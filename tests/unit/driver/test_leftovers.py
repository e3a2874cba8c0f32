"""gc: only own, only unused, never in the way of a running driver (field report 52)."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from driver_docker import labels
from driver_docker.bind_socket import NAMESPACE_LOCK, FileLock
from driver_docker.config_sources import load_config
from driver_docker.engine import Engine, EngineAbsentError, EngineConflictError
from driver_docker.engine_objects import ContainerFacts, ContainerRow, ContainerStatus, HealthStatus, VolumeFacts
from driver_docker.errors import ConfigurationError, RecordError
from driver_docker.leftovers import Sweeper, is_locked
from driver_docker.records import RECORD_FILE, RecordStore
from driver_docker.sandbox_record import RecordPhase, SandboxRecord

OLD = datetime.now(UTC) - timedelta(hours=1)
NS = "default"


@dataclass
class FakeEngine:
    """Containers and volumes by name."""

    containers: dict[str, dict[str, Any]] = field(default_factory=dict)
    volumes: dict[str, dict[str, Any]] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)

    def container(self, name: str, owner: str, sandbox_id: str = "", mounts: tuple[str, ...] = (), **more: Any) -> None:
        self.containers[name] = {"labels": made_by(owner, sandbox_id), "mounts": mounts, "at": OLD} | more

    def volume(self, name: str, owner: str, sandbox_id: str = "", **more: Any) -> None:
        self.volumes[name] = {"labels": made_by(owner, sandbox_id), "at": OLD} | more

    async def list_containers(self, wanted: dict[str, str]) -> tuple[ContainerRow, ...]:
        return tuple(
            ContainerRow(
                container_id=name, name=name, image_id="i", labels=it["labels"], status=ContainerStatus.RUNNING
            )
            for name, it in self.containers.items()
            if wanted.items() <= it["labels"].items()
        )

    async def inspect_container(self, container: str) -> ContainerFacts:
        if container not in self.containers:
            raise EngineAbsentError("gone")
        it = self.containers[container]
        return ContainerFacts(
            container_id=container,
            name=container,
            image_id="i",
            labels=it["labels"],
            status=ContainerStatus.RUNNING,
            exit_code=None,
            oom_killed=False,
            error="",
            created_at=it["at"],
            started_at=None,
            finished_at=None,
            network_mode="none",
            networks=(),
            health=HealthStatus.NONE,
            memory_limit_bytes=None,
            tty=False,
            volume_names=it["mounts"],
        )

    async def list_volumes(self, wanted: dict[str, str]) -> tuple[VolumeFacts, ...]:
        return tuple(
            VolumeFacts(name=name, driver="local", labels=it["labels"], options={}, created_at=it["at"])
            for name, it in self.volumes.items()
            if wanted.items() <= it["labels"].items()
        )

    async def remove_container(self, container: str, *, force: bool = True) -> None:
        if self.containers.pop(container, None) is None:
            raise EngineAbsentError("gone")

    async def remove_volume(self, name: str) -> None:
        if name in self.held:
            raise EngineConflictError("volume is in use")
        if self.volumes.pop(name, None) is None:
            raise EngineAbsentError("gone")


def made_by(owner: str, sandbox_id: str) -> dict[str, str]:
    found = labels.owner_labels(labels.Owner(namespace=NS, driver=owner))
    return found | ({labels.SANDBOX_ID: sandbox_id} if sandbox_id else {})


def record(sandbox_id: str, phase: RecordPhase, workload: str = "", supervisor: str = "") -> SandboxRecord:
    return SandboxRecord(
        sandbox_id=sandbox_id,
        name="n",
        workspace="w",
        phase=phase,
        changed_at=OLD,
        workload_id=workload,
        supervisor_id=supervisor,
    )


@dataclass
class Scene:
    """A state folder and an engine with everything that can be there."""

    engine: FakeEngine
    store: RecordStore
    sweeper: Sweeper
    owner: str


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    config = load_config({"bind_socket": Path("/run/x/d.sock"), "state_dir": tmp_path}, environment={})
    store = RecordStore(config.namespace_dir)
    owner = store.open()
    engine = FakeEngine()
    store.save(record("live", RecordPhase.ACTIVE, "live-work", "live-super"))
    store.save(record("stopped", RecordPhase.STOPPED, "stopped-work"))
    store.save(record("begun", RecordPhase.PROVISIONING))
    store.save(record("failed", RecordPhase.FAILED))
    store.save(record("going", RecordPhase.DELETING, "going-work"))
    for sandbox_id in ("live", "stopped", "begun", "failed", "going", "lost"):
        engine.container(f"{sandbox_id}-work", owner, sandbox_id, mounts=("runtime-used",))
        engine.volume(f"{sandbox_id}-channel", owner, sandbox_id)
    engine.container("live-super", owner, "live")
    engine.container("live-super-older", owner, "live")
    engine.container("fill", owner)
    engine.volume("runtime-used", owner)
    engine.volume("runtime-unused", owner)
    engine.container("foreign-work", "another", "foreign")
    engine.volume("foreign-channel", "another", "foreign")
    (store.directory / "half").mkdir(mode=0o700)
    return Scene(engine, store, Sweeper(cast("Engine", engine), store, config), owner)


ALONE = {
    "failed-work",
    "lost-work",
    "live-super-older",
    "fill",
    "failed-channel",
    "lost-channel",
    "runtime-unused",
    "half",
}


async def test_field_report_52_without_a_driver_everything_own_and_unused_goes(scene: Scene) -> None:
    found = await scene.sweeper.survey()
    assert {Path(leftover.name).name for leftover in found.leftovers} == ALONE
    assert (found.driver_runs, found.foreign) == (False, 2)
    before = set(scene.engine.containers) | set(scene.engine.volumes)
    swept, removals = await scene.sweeper.sweep()
    assert [removal.error for removal in removals] == [""] * len(ALONE)
    assert swept.leftovers == found.leftovers
    assert before - set(scene.engine.containers) - set(scene.engine.volumes) == ALONE - {"half"}
    assert not (scene.store.directory / "half").exists()
    assert not (scene.store.directory / NAMESPACE_LOCK).exists()
    assert (await scene.sweeper.survey()).leftovers == ()


async def test_field_report_52_beside_a_driver_only_what_it_cannot_know_goes(scene: Scene) -> None:
    scene.engine.container("young-work", scene.owner, "young", at=datetime.now(UTC))
    scene.engine.volume("young-channel", scene.owner, "young", at=datetime.now(UTC))
    lock = FileLock(scene.store.directory / NAMESPACE_LOCK, held_by="a test")
    try:
        assert is_locked(scene.store.directory)
        swept, removals = await scene.sweeper.sweep()
    finally:
        lock.release()
    assert not is_locked(scene.store.directory)
    assert swept.driver_runs
    assert {removal.leftover.name for removal in removals} == {"lost-work", "lost-channel"}


@pytest.mark.parametrize("driver_runs", [False, True])
async def test_what_may_belong_to_a_record_that_cannot_be_read_is_named_and_kept(
    scene: Scene, driver_runs: bool
) -> None:
    scene.store.save_files("lost", {RECORD_FILE: b"{"})
    lock = FileLock(scene.store.directory / NAMESPACE_LOCK, held_by="a test") if driver_runs else None
    swept, removals = await scene.sweeper.sweep()
    if lock is not None:
        lock.release()
    assert "lost" not in {removal.leftover.sandbox_id for removal in removals}
    assert {"lost-work"} <= scene.engine.containers.keys()
    assert {"lost-channel"} <= scene.engine.volumes.keys()
    assert [each.sandbox_id for each in swept.unreadable] == ["lost"]


async def test_nothing_is_own_without_a_state_folder(tmp_path: Path, scene: Scene) -> None:
    config = load_config({"bind_socket": Path("/run/x/d.sock"), "state_dir": tmp_path / "other"}, environment={})
    sweeper = Sweeper(cast("Engine", scene.engine), RecordStore(config.namespace_dir), config)
    swept, removals = await sweeper.sweep()
    assert (swept.leftovers, removals) == ((), ())
    assert swept.foreign == len(scene.engine.containers) + len(scene.engine.volumes)
    assert not (tmp_path / "other").exists()


async def test_a_state_folder_that_cannot_be_read_stops_everything(tmp_path: Path, scene: Scene) -> None:
    (tmp_path / "file").write_text("no folder")
    config = load_config({"bind_socket": Path("/run/x/d.sock"), "state_dir": tmp_path / "file"}, environment={})
    sweeper = Sweeper(cast("Engine", scene.engine), RecordStore(config.namespace_dir), config)
    for look in (sweeper.survey, sweeper.sweep):
        with pytest.raises(RecordError, match="cannot be read"):
            await look()


async def test_field_report_47_a_volume_in_use_is_told_and_kept(scene: Scene) -> None:
    scene.engine.held.add("lost-channel")
    _, removals = await scene.sweeper.sweep()
    assert [removal.leftover.name for removal in removals if removal.error] == ["lost-channel"]
    assert "lost-channel" in scene.engine.volumes


async def test_a_sandbox_that_was_created_again_keeps_its_volumes(scene: Scene) -> None:
    real = scene.engine.remove_container

    async def create_again(container: str, *, force: bool = True) -> None:
        await real(container)
        scene.store.save(record("lost", RecordPhase.PROVISIONING))

    scene.engine.remove_container = create_again  # type: ignore[method-assign]
    _, removals = await scene.sweeper.sweep()
    assert "lost-channel" in scene.engine.volumes
    assert [removal.leftover.name for removal in removals if removal.error] == ["lost-channel"]


async def test_no_driver_comes_up_while_things_are_removed(scene: Scene) -> None:
    refused = []
    real = scene.engine.remove_container

    async def try_to_start(container: str, *, force: bool = True) -> None:
        with pytest.raises(ConfigurationError):
            FileLock(scene.store.directory / NAMESPACE_LOCK, held_by="gc")
        refused.append(container)
        await real(container)

    scene.engine.remove_container = try_to_start  # type: ignore[method-assign]
    await scene.sweeper.sweep()
    assert refused
