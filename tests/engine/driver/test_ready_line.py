"""A supervisor that says by itself when it is ready, on a real engine."""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from scripted import stub_images
from scripted.compute_gateway import ready
from scripted.retained import start, stop, wait_ready_again

from driver_docker.engine import EngineAbsentError
from driver_docker.engine_docker import DockerEngine
from openshell.ready_line import READY_LABEL, READY_LABEL_VALUE, READY_LINE
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from docker import APIClient
    from scripted.driver_bench import DriverBench

TELLING = f"""#!/bin/sh
[ "$1" = health ] && exit 1
echo 'not yet' >&2
echo '{READY_LINE}' >&2
trap 'exit 0' TERM
while :; do sleep 1000 & wait $!; done
"""
"""Its health command never succeeds, so only the line can have made it ready."""


@pytest.fixture
def telling(docker_client: APIClient) -> Iterator[str]:
    """The image of a supervisor that tells."""
    changes = ["USER 65534:65534", stub_images.REVISION_LABEL, f"LABEL {READY_LABEL}={READY_LABEL_VALUE}"]
    files = {"openshell-supervisor": (TELLING.encode(), 0o555)}
    reference = stub_images.load(docker_client, "telling", secrets.token_hex(4), files, changes)
    yield reference
    docker_client.remove_image(reference, force=True)


async def test_a_supervisor_that_tells_is_ready_without_being_asked(bench: DriverBench, telling: str) -> None:
    async with bench.running(supervisor_image=telling) as (_, link):
        wanted = bench.sandbox()
        assert ready(await bench.launch(link, wanted)).reason == "BackendReady"
        assert bench.container(wanted.id, "supervisor")["ExecIDs"] is None
        await stop(link, wanted.id)
        seen = len(link.events)
        await start(link, wanted.id, "again", None)
        await wait_ready_again(link, wanted.id, seen)
        assert bench.container(wanted.id, "supervisor")["ExecIDs"] is None
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


@contextmanager
def running(bench: DriverBench, script: str) -> Iterator[str]:
    """A container that runs a script."""
    container: str = bench.client.create_container(
        bench.images.workload,
        entrypoint=["/bin/sh", "-c", script],
        labels={"openshell.ai/sandbox-namespace": bench.namespace},
    )["Id"]
    bench.client.start(container)
    try:
        yield container
    finally:
        bench.client.remove_container(container, force=True)


@pytest.mark.parametrize(
    ("script", "timeout_seconds", "is_found"),
    [
        ("echo x >&2; sleep 0.2; echo wanted >&2; sleep 100", 20.0, True),
        ("echo wanted; echo other >&2", 20.0, False),
        ("sleep 100", 0.3, False),
        ("while :; do echo x >&2; sleep 0.05; done", 0.3, False),
    ],
    ids=["comes", "only on standard output, and the end", "silence", "never"],
)
async def test_a_line_is_waited_for_until_it_comes_or_log_or_time_end(
    bench: DriverBench, script: str, timeout_seconds: float, is_found: bool
) -> None:
    with running(bench, script) as container:
        async with await DockerEngine.connect(bench.docker_host) as engine:
            assert await engine.wait_for_line(container, "wanted", timeout_seconds=timeout_seconds) is is_found


async def test_the_log_of_no_container_is_absent(bench: DriverBench) -> None:
    async with await DockerEngine.connect(bench.docker_host) as engine:
        with pytest.raises(EngineAbsentError):
            await engine.wait_for_line("no-such-container", "wanted", timeout_seconds=1.0)
