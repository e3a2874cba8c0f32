"""The driver as an operator runs it: a process with flags, killed or asked to end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scripted.compute_gateway import ComputeGateway

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from openshell.wire.compute.v1 import compute_driver_pb2 as pb
    from scripted.driver_bench import DriverBench

MAIN = "from driver_docker.cli import main; main()"
COMMAND = (sys.executable, "-c", MAIN, "serve")
COMMAND_NAME = "driver_docker.cli"


@dataclass(frozen=True)
class Setup:
    """What a driver process has beside its flags."""

    environment: Mapping[str, str] = field(default_factory=dict)
    prelude: str = ""
    """Python statements that it runs first."""


def flags(bench: DriverBench, **changes: str) -> list[str]:
    """The command line of a driver on a bench."""
    values = {
        "bind-socket": str(bench.folder / "s" / "d.sock"),
        "state-dir": str(bench.folder / "state"),
        "docker-socket": bench.docker_host,
        "sandbox-label": bench.namespace,
        "sandbox-runtime-image": bench.images.runtime,
        "supervisor-image": bench.images.supervisor,
        "default-image": bench.images.workload,
    }
    return [f"--{key}={value}" for key, value in (values | changes).items()]


async def spawn(arguments: list[str], environment: Mapping[str, str] | None = None, *, prelude: str = "") -> Process:
    """Start a driver process; its log is on standard error.

    Args:
        arguments: Its flags.
        environment: Added to this process's own.
        prelude: Python statements that it runs first.
    """
    command = (sys.executable, "-c", prelude + MAIN, "serve")
    return await asyncio.create_subprocess_exec(
        *command, *arguments, stdout=PIPE, stderr=PIPE, env={**os.environ, **(environment or {})}
    )


async def run(arguments: list[str], environment: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Run a driver that is expected to end by itself; its exit code and output."""
    process = await spawn(arguments, environment)
    out, err = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode or 0, out.decode(), err.decode()


@asynccontextmanager
async def serving(bench: DriverBench, setup: Setup | None = None, /, **changes: str) -> AsyncIterator[Process]:
    """A driver process that has announced its socket; killed at the end when it still runs."""
    setup = setup or Setup()
    process = await spawn(flags(bench, **changes), setup.environment, prelude=setup.prelude)
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        if not line:
            assert process.stderr is not None
            raise AssertionError((await process.stderr.read()).decode())
        assert line.decode().strip() == f"serving on {bench.folder / 's' / 'd.sock'}"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def end(process: Process, number: signal.Signals = signal.SIGTERM) -> int:
    """Ask a driver to end and wait for it."""
    process.send_signal(number)
    return await asyncio.wait_for(process.wait(), 10)


async def kill(process: Process) -> None:
    """End a driver as a crash would, and wait for it."""
    process.kill()
    await process.wait()


async def launched_and_killed(bench: DriverBench) -> pb.DriverSandbox:
    """A sandbox that was launched by a driver which has been killed since."""
    async with serving(bench) as process, ComputeGateway(f"unix:{socket_of(bench)}") as link:
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        await kill(process)
    return wanted


def socket_of(bench: DriverBench) -> Path:
    """Where the driver of a bench serves."""
    return bench.folder / "s" / "d.sock"
