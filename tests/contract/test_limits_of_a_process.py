"""A driver that has run out of descriptors."""

from __future__ import annotations

import asyncio
import resource
from typing import Final

import pytest
from scripted.compute_gateway import ComputeGateway, peer, ready
from scripted.deployment import Deployment, Place

from openshell.wire.compute.v1 import compute_driver_pb2 as pb

CONNECTIONS: Final = 70
ROOM: Final = 12
SLACK: Final = 12


@pytest.mark.parametrize("deployment", [Place.SOCKET], indirect=True, ids=str)  # the limit is the whole process's
async def test_field_report_04_a_driver_without_descriptors_recovers(deployment: Deployment) -> None:
    async with deployment.serving() as served:
        await served.bench.launch(served.link, wanted := served.bench.sandbox())
        before = served.descriptors()
        _, hard = resource.prlimit(served.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(served.pid, resource.RLIMIT_NOFILE, (before + ROOM, hard))
        path = str(served.bench.folder / "s" / "d.sock")
        writers = [(await asyncio.open_unix_connection(path))[1] for _ in range(CONNECTIONS)]
        async with asyncio.timeout(30):
            while served.descriptors() < before + ROOM:  # noqa: ASYNC110 - another process accepts
                await asyncio.sleep(0.02)
        for writer in writers:
            writer.close()
            await writer.wait_closed()
        async with ComputeGateway(served.link.address) as later:
            await later.stub.GetCapabilities(pb.GetCapabilitiesRequest(gateway=peer()))
            assert ready(await later.wait_ready(wanted.id)).reason == "BackendReady"
        async with asyncio.timeout(30):
            while served.descriptors() > before + SLACK:  # noqa: ASYNC110 - another process closes
                await asyncio.sleep(0.02)
        await served.delete(wanted.id)
