"""What is shown of a sandbox when no driver has judged it yet."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from driver_docker.engine import EngineAbsentError
from driver_docker.engine_objects import ContainerStatus
from driver_docker.events import ConditionStatus
from driver_docker.overview import look
from driver_docker.records import RecordStore
from driver_docker.sandbox_record import Failure, RecordPhase, SandboxRecord

if TYPE_CHECKING:
    from pathlib import Path

    from driver_docker.overview import SandboxView

AT = datetime(2026, 10, 5, tzinfo=UTC)


class Engine:
    """One sandbox's workload, which runs, and its supervisor."""

    def __init__(self, supervisor: ContainerStatus | None, *, is_whole: bool = True) -> None:
        self._supervisor = supervisor
        self._is_whole = is_whole

    async def list_containers(self, _: object) -> list[Any]:
        states = {"w": ContainerStatus.RUNNING, "s": self._supervisor}
        return [SimpleNamespace(container_id=each, status=status) for each, status in states.items() if status]

    async def inspect_container(self, container: str) -> Any:
        if not self._is_whole:
            raise EngineAbsentError(f"No such container: {container}")
        return SimpleNamespace(status=ContainerStatus.RUNNING, finished_at=None)


def _record(**changes: Any) -> SandboxRecord:
    values = {"phase": RecordPhase.ACTIVE, "workload_id": "w", "supervisor_id": "s"} | changes
    return SandboxRecord(sandbox_id="sb-1", name="n", workspace="w", changed_at=AT, **cast("Any", values))


async def _only_view(folder: Path, engine: Engine | None) -> SandboxView:
    """How the one sandbox of a store is shown."""
    store = RecordStore(folder / "n")
    store.open()
    store.save(_record())
    (view,) = (await look(store, "n", cast("Any", engine))).views
    return view


@pytest.mark.parametrize(
    ("supervisor", "status"),
    [
        (ContainerStatus.RUNNING, ConditionStatus.TRUE),
        (ContainerStatus.EXITED, ConditionStatus.UNKNOWN),
        (None, ConditionStatus.UNKNOWN),
    ],
)
async def test_a_sandbox_whose_supervisor_is_gone_is_not_shown_as_ready(
    tmp_path: Path, supervisor: ContainerStatus | None, status: ConditionStatus
) -> None:
    view = await _only_view(tmp_path, Engine(supervisor))
    assert view.ready.status is status
    assert ("is not running" in view.ready.message) is (status is ConditionStatus.UNKNOWN)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (None, "could not be looked at yet"),
        (Engine(ContainerStatus.RUNNING, is_whole=False), "is gone, and no driver has said why yet"),
    ],
)
async def test_a_sandbox_that_came_up_is_not_said_to_be_coming_up(
    tmp_path: Path, engine: Engine | None, words: str
) -> None:
    view = await _only_view(tmp_path, engine)
    assert (view.ready.status, view.ready.reason) == (ConditionStatus.UNKNOWN, "InspectFailed")
    assert words in view.ready.message


def test_a_dead_sandbox_is_not_shown_as_active() -> None:
    assert _record().shown_phase == "active"
    assert _record(failure=Failure(reason="r", message="m", at=AT)).shown_phase == "ended"
