"""A supervisor that says by itself when it is ready, on a real engine."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from scripted import driver_process, stub_images
from scripted.compute_gateway import ComputeGateway, ready
from scripted.driver_bench import NAMESPACE
from scripted.engine_proxy import EngineProxy, Road
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
name="$OPENSHELL_SANDBOX"
if [ "$1" = health ]; then
  case "$name" in mute*) exit 0;; *) exit 1;; esac
fi
trap 'exit 0' TERM
case "$name" in mute*) ;; *) echo 'not yet' >&2; echo '{READY_LINE}' >&2;; esac
while :; do sleep 1000 & wait $!; done
"""
"""Its health command succeeds only for a sandbox whose name begins with ``mute``, its line comes for any other."""


def descriptors() -> int:
    """How many files and sockets this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


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
        labels={NAMESPACE: bench.namespace},
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


async def test_who_waits_for_lines_keeps_nobody_else_waiting_and_leaves_no_connection(bench: DriverBench) -> None:
    with running(bench, "sleep 100") as container:
        async with await DockerEngine.connect(bench.docker_host) as engine:
            await engine.ping()
            before = descriptors()
            waiting = [
                asyncio.create_task(engine.wait_for_line(container, "wanted", timeout_seconds=60.0)) for _ in range(32)
            ]
            async with asyncio.timeout(30):
                while descriptors() < before + 31:  # noqa: ASYNC110 - threads connect; one had a connection
                    await asyncio.sleep(0.01)
                await asyncio.gather(*(engine.inspect_container(container) for _ in range(20)))
                result = await engine.exec_command(container, ("true",), timeout_seconds=20.0)
            assert result.exit_code is not None
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            async with asyncio.timeout(30):
                while descriptors() > before + 20:  # noqa: ASYNC110 - as above; a pool is kept
                    await asyncio.sleep(0.01)


async def test_a_cut_log_is_no_end_of_the_launch(bench: DriverBench, telling: str) -> None:
    flags = {"docker-socket": str(bench.folder / "e.sock"), "supervisor-image": telling}
    async with (
        EngineProxy.between(bench.folder / "e.sock", bench.docker_host) as proxy,
        driver_process.serving(bench, **flags) as process,
        ComputeGateway(f"unix:{driver_process.socket_of(bench)}") as link,
    ):
        wanted = bench.sandbox("mute")
        await link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted))
        async with asyncio.timeout(30):
            while not any(b"/logs?" in line for line in proxy.asked):  # noqa: ASYNC110 - another process asks
                await asyncio.sleep(0.01)
        await proxy.set(Road.CUT)
        await proxy.set(Road.OPEN)
        assert ready(await link.wait_ready(wanted.id)).reason == "BackendReady"
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))
        assert await driver_process.end(process) == 0


async def test_the_log_of_no_container_is_absent(bench: DriverBench) -> None:
    async with await DockerEngine.connect(bench.docker_host) as engine:
        with pytest.raises(EngineAbsentError):
            await engine.wait_for_line("no-such-container", "wanted", timeout_seconds=1.0)
