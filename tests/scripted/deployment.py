"""One driver in either of two places: in the test's process, or as the process that an operator runs."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openshell.wire.compute.v1 import compute_driver_pb2 as pb
from scripted import driver_process
from scripted.compute_gateway import SECRET, ComputeGateway, ready

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator

    from scripted.driver_bench import DriverBench

MAX_TEXT_BYTES = 1024
CONTRACT_REASONS = frozenset(
    {
        "Starting",
        "BackendReady",
        "ContainerExited",
        "ContainerRuntimeRestart",
        "ContainerStopped",
        "ContainerRestarting",
        "ContainerPaused",
        "ContainerDead",
        "Deleting",
        "ImagePullFailed",
        "IdentityResolutionFailed",
        "BoundaryStateCreateFailed",
        "BoundaryChannelCreateFailed",
        "BoundaryConfigWriteFailed",
        "SandboxTokenWriteFailed",
        "ContainerCreateFailed",
        "ContainerStartFailed",
        "OuterFenceInspectFailed",
        "OuterFenceRejected",
        "OuterFenceViolation",
        "ResourceAdmissionDenied",
        "ResourceAdmissionLookupFailed",
        "ControlSupervisorStartFailed",
        "ControlSupervisorExited",
        "WorkspaceValidationFailed",
    }
)
"""What a Docker driver may give as the reason of a condition (compute-driver contract 4.4)."""


class Place(StrEnum):
    """Where a driver runs."""

    IN_PROCESS = "in_process"
    SOCKET = "over_the_socket"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A bench and the place where its drivers run."""

    bench: DriverBench
    place: Place

    def behind(self, engine: str) -> Deployment:
        """The same, with another way to the engine."""
        return replace(self, bench=replace(self.bench, docker_host=engine))

    @asynccontextmanager
    async def serving(self, *, kill: bool = False, **changes: Any) -> AsyncIterator[Served]:
        """A driver that serves, and a gateway that watches it.

        Args:
            kill: Whether a driver that is a process is killed at the end instead of being asked to end.
            changes: Keys of the configuration, no tables.
        """
        if self.place is Place.IN_PROCESS:
            async with self.bench.running(**changes) as (_, link):
                served = Served(bench=self.bench, link=link, pid=os.getpid())
                yield served
                served.check_events()
            return
        values = {"stop_grace_seconds": 2, "supervisor_stop_grace_seconds": 2} | changes
        flags: dict[str, Any] = {key.replace("_", "-"): str(value) for key, value in values.items()}
        async with driver_process.serving(self.bench, **flags) as process:
            log = asyncio.create_task(_read(process))
            try:
                async with ComputeGateway(f"unix:{driver_process.socket_of(self.bench)}") as link:
                    served = Served(bench=self.bench, link=link, pid=process.pid)
                    yield served
                    served.check_events()
                if kill:
                    await driver_process.kill(process)
                else:
                    assert await driver_process.end(process) == 0
                assert not [secret for secret in _SECRETS if secret in await log]
            finally:
                log.cancel()
                await asyncio.wait([log])


_SECRETS = (SECRET.encode(), SECRET[::-1].replace("=", "").encode(), b"BEGIN PRIVATE KEY")


async def _read(process: Process) -> bytes:
    assert process.stderr is not None
    return await process.stderr.read()


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A driver that serves."""

    bench: DriverBench
    link: ComputeGateway
    pid: int

    async def observed(self, sandbox_id: str) -> pb.DriverSandbox:
        """A sandbox as the driver tells it when asked."""
        got = await self.link.stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=sandbox_id))
        found: pb.DriverSandbox = got.sandbox
        return found

    async def listed(self) -> dict[str, pb.DriverSandbox]:
        """Every sandbox of the driver by its id."""
        listed = await self.link.stub.ListSandboxes(pb.ListSandboxesRequest())
        return {entry.id: entry for entry in listed.sandboxes}

    async def delete(self, *sandbox_ids: str) -> None:
        """Delete sandboxes and see that nothing is left of them."""
        for sandbox_id in sandbox_ids:
            answer = await self.link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=sandbox_id))
            assert answer.deleted
            await self.link.wait_deleted(sandbox_id)
            assert self.bench.sandbox_left_over(sandbox_id) == []

    def descriptors(self) -> int:
        """How many files the driver's process holds."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def threads(self) -> int:
        """How many threads the driver's process has."""
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))

    def check_events(self) -> None:
        """What holds for every event that a driver ever sends (compute-driver contract 0, 3.11, 4.4 and 4.5)."""
        assert not self.link.call.done(), "the driver ended a watch"
        for _, event in self.link.events:
            kind = event.WhichOneof("payload")
            if kind == "sandbox":
                self._check_snapshot(event.sandbox.sandbox)
            elif kind == "platform_event":
                told = event.platform_event.event
                assert event.platform_event.sandbox_id
                assert (told.source, told.type in {"Normal", "Warning"}, bool(told.reason)) == ("docker", True, True)
                assert told.HasField("event_time")
                _check_text(told.message)
            else:
                assert event.deleted.sandbox_id
            assert not [secret for secret in _SECRETS if secret in event.SerializeToString()]

    def _check_snapshot(self, snapshot: pb.DriverSandbox) -> None:
        assert all((snapshot.id, snapshot.name, snapshot.workspace))
        assert snapshot.namespace == self.bench.namespace
        assert not snapshot.name.startswith("openshell-"), "the gateway's own name, never the container's"
        assert snapshot.status.name.startswith("openshell-")
        assert not snapshot.HasField("spec")
        assert [each.type for each in snapshot.status.conditions].count("Ready") == 1
        for condition in snapshot.status.conditions:
            assert condition.reason in CONTRACT_REASONS
            assert condition.status in {"True", "False", "Unknown"}
            assert (condition.type == "Ready" and condition.status == "True") == (condition.reason == "BackendReady")
            assert condition.HasField("transition_time")
            _check_text(condition.message)
        assert snapshot.status.deleting == (ready(snapshot).reason == "Deleting")


def _check_text(text: str) -> None:
    assert text
    assert text.isprintable(), text
    assert len(text.encode()) <= MAX_TEXT_BYTES
    assert not text.endswith(":")
