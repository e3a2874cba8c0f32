from __future__ import annotations

import struct
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, cast

import pytest

from driver_docker.config import PublicDetail
from driver_docker.engine_objects import ContainerFacts, ContainerStatus, HealthStatus
from driver_docker.postmortem import examine
from driver_docker.sandbox_record import RecordPhase, SandboxRecord
from driver_docker.sandboxes import Sandbox
from driver_docker.verdict import Reason
from openshell.verdicts import Category, Component, LastWords, Stage

if TYPE_CHECKING:
    from driver_docker.services import Services

NOW = datetime(2026, 10, 5, tzinfo=UTC)


@dataclass
class DeadEngine:
    """One container that exited with a code and left a log on standard error."""

    log: bytes

    async def inspect_container(self, container: str) -> ContainerFacts:
        return ContainerFacts(
            container_id=container,
            name="s",
            image_id="sha256:0",
            labels={},
            status=ContainerStatus.EXITED,
            exit_code=69,
            oom_killed=False,
            error="",
            created_at=NOW,
            started_at=NOW,
            finished_at=NOW,
            network_mode="host",
            networks=(),
            health=HealthStatus.NONE,
            memory_limit_bytes=None,
            tty=False,
        )

    async def log_tail(self, container: str, *, max_lines: int) -> bytes:
        return struct.pack(">BxxxL", 2, len(self.log)) + self.log


@dataclass
class Settings:
    """The one key that is looked at."""

    public_detail: PublicDetail


@dataclass
class Surroundings:
    """What an examination uses of the driver."""

    engine: DeadEngine
    config: Settings = field(default_factory=lambda: Settings(PublicDetail.LAST_LINE))


def launching() -> Sandbox:
    return Sandbox(
        record=SandboxRecord(
            sandbox_id="id-1",
            name="n",
            workspace="w",
            phase=RecordPhase.PROVISIONING,
            changed_at=NOW,
            workload_id="workload",
            supervisor_id="supervisor",
        )
    )


@pytest.mark.parametrize("detail", PublicDetail)
@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        (Stage.RUNNING, Reason.CONTROL_SUPERVISOR_EXITED),
        (Stage.READINESS, Reason.CONTROL_SUPERVISOR_START_FAILED),
        (Stage.BUILD, Reason.CONTROL_SUPERVISOR_START_FAILED),
    ],
)
async def test_a_supervisor_that_had_been_ready_exited_even_if_the_driver_has_not_seen_it_ready(
    stage: Stage, reason: Reason, detail: PublicDetail
) -> None:
    words = LastWords(stage=stage, category=Category.INFRASTRUCTURE, public="gone")
    services = Surroundings(DeadEngine(words.to_line().encode() + b"\n"), Settings(detail))
    ended = await examine(cast("Services", services), launching(), Component.SUPERVISOR)
    assert ended.verdict.reason == reason


async def test_a_supervisor_without_words_never_became_ready_as_far_as_one_knows() -> None:
    ended = await examine(cast("Services", Surroundings(DeadEngine(b"x\n"))), launching(), Component.SUPERVISOR)
    assert ended.verdict.reason == Reason.CONTROL_SUPERVISOR_START_FAILED
