"""Stopping and starting sandboxes as a gateway does, and looking at what came of it."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from openshell.wire.compute.v1 import compute_driver_pb2 as pb
from scripted.compute_gateway import ready

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from docker import APIClient

    from openshell.isolation.documents import LaunchAuthentication
    from scripted.compute_gateway import ComputeGateway

UNSETTLED = {"Starting", "ContainerStopped"}
"""Reasons that a sandbox on its way to ready may be told with."""


async def stop(link: ComputeGateway, sandbox_id: str) -> None:
    """Stop a sandbox."""
    await link.stub.StopSandbox(pb.StopSandboxRequest(sandbox_id=sandbox_id))


async def start(
    link: ComputeGateway, sandbox_id: str, generation: str, launch: LaunchAuthentication | None
) -> pb.StartSandboxResponse:
    """Start a sandbox."""
    answer: pb.StartSandboxResponse = await link.stub.StartSandbox(
        pb.StartSandboxRequest(
            sandbox_id=sandbox_id,
            generation_id=generation,
            launch_authentication=launch.to_json() if launch is not None else b"",
        )
    )
    return answer


async def wait_ready_again(
    link: ComputeGateway, sandbox_id: str, seen: int, *, failed_before: bool = False
) -> pb.DriverSandbox:
    """The first ready snapshot after the events seen so far; a terminal one in between is a failure.

    Args:
        link: Where the events arrive.
        sandbox_id: Which sandbox.
        seen: How many events had been seen when it was asked for.
        failed_before: It had failed by then. What is still told of that, such as that its container is gone, comes
            before the new launch is told as starting, and nothing counts until then.
    """

    def settled(event: pb.WatchSandboxesEvent) -> bool:
        later = [entry for _, entry in link.events[seen:] if entry.sandbox.sandbox.id == sandbox_id]
        if failed_before:
            begun = (n for n, entry in enumerate(later) if ready(entry.sandbox.sandbox).reason == "Starting")
            later = later[next(begun, len(later)) :]
        # A stop that was waited for may still have to arrive.
        return any(entry is event for entry in later) and ready(event.sandbox.sandbox).reason not in UNSETTLED

    _, event = await link.wait(settled)
    assert ready(event.sandbox.sandbox).reason == "BackendReady", ready(event.sandbox.sandbox)
    return event.sandbox.sandbox


async def stopped(link: ComputeGateway, sandbox_id: str) -> bool:
    """Whether the driver says that a sandbox is stopped on request."""
    got = await link.stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=sandbox_id), wait_for_ready=True)
    conditions = {c.type: (c.status, c.reason) for c in got.sandbox.status.conditions}
    return conditions == {"Ready": ("False", "ContainerStopped"), "Suspended": ("True", "ContainerStopped")}


def refreshed(launch: LaunchAuthentication) -> LaunchAuthentication:
    """Newer credentials of the same session."""
    old = launch.supervisor
    bundle = replace(old, session_rotation=old.session_rotation + 1, auth_epoch=old.auth_epoch + 1)
    return replace(launch, supervisor=bundle, supervisor_json=b"")


async def refusal(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    """The status and the text of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    text = refused.value.details() or ""
    assert text
    assert len(text.encode()) <= 1024
    assert text.isprintable()
    return refused.value.code(), text


def read_text(client: APIClient, container: str, path: str) -> bytes:
    """The content of a file in a container."""
    chunks, _ = client.get_archive(container, path)
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
        stream = archive.extractfile(archive.getmembers()[0])
        assert stream is not None
        return stream.read()
