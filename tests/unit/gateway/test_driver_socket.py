"""Why nobody is reached on the driver's socket, and what each kind of caller is told."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import cast

import grpc
import pytest
from scripted.gateway_bench import WORKSPACE, GatewayBench
from structlog.testing import capture_logs

from gateway_embedded.app import Gateway
from gateway_embedded.config import DriverPolicy, DriverTimings, GatewayConfig
from gateway_embedded.driver_link import DriverLink
from gateway_embedded.driver_socket import SocketFault, connection_fault, protocol_fault
from gateway_embedded.errors import DriverUnreachableError, HandshakeError, UnavailableError
from gateway_embedded.leftovers import Leftovers
from gateway_embedded.observation import DriverObserver
from gateway_embedded.states import SandboxStates
from openshell.wire.compute.v1 import compute_driver_pb2
from openshell.wire.v1 import openshell_pb2 as pb


@asynccontextmanager
async def http1_server(path: Path) -> AsyncIterator[None]:
    """What a container engine answers to a gRPC client."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_unix_server(refuse, path)
    try:
        yield
    finally:
        server.close()
        await server.wait_closed()


def config(folder: Path, *, window_seconds: float = 30.0) -> GatewayConfig:
    return GatewayConfig(
        listen_port=0,
        state_dir=folder / "state",
        compute_driver_socket=folder / "driver.sock",
        driver_timings=DriverTimings(dial_window_seconds=window_seconds),
    )


@asynccontextmanager
async def gateway(of: GatewayConfig) -> AsyncIterator[Gateway]:
    running = Gateway(of)
    await running.start()
    try:
        yield running
    finally:
        await running.stop()


def test_a_missing_file_may_still_come(tmp_path: Path) -> None:
    fault = connection_fault(tmp_path / "nobody")
    assert fault is not None
    assert (fault.cause, fault.lasting) == ("there is no such file", False)
    assert "--compute-driver-socket" in fault.cure


def test_a_process_out_of_files_is_told_so_and_may_try_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_file_left(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("gateway_embedded.driver_socket.socket.socket", no_file_left)
    fault = connection_fault(tmp_path / "driver.sock")
    assert fault is not None
    assert (fault.cause, fault.lasting) == ("Too many open files", False)


def test_a_failure_without_a_number_is_told_in_its_own_words(tmp_path: Path) -> None:
    fault = connection_fault(tmp_path / ("x" * 200))
    assert fault is not None
    assert fault.cause == "AF_UNIX path too long"


def test_a_socket_that_its_driver_left_behind_may_be_taken_over(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "left"))
    fault = connection_fault(tmp_path / "left")
    assert fault is not None
    assert "nobody listens" in fault.cause
    assert not fault.lasting


def test_an_ordinary_file_stays_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    fault = connection_fault(tmp_path / "file")
    assert fault is not None
    assert (fault.cause, fault.lasting) == ("that file is not a socket", True)


def test_a_denied_permission_names_the_user_and_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_: socket.socket, __: str) -> None:
        raise PermissionError(13, "Permission denied")

    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    monkeypatch.setattr("gateway_embedded.driver_socket.socket.socket.connect", denied)
    monkeypatch.setattr("gateway_embedded.driver_socket.os.access", lambda path, *_, **__: path != closed)
    fault = connection_fault(closed / "driver.sock")
    assert fault is not None
    assert fault.cause == (
        f"permission denied to user {os.geteuid()}; {closed} belongs to user {os.geteuid()} and has mode 0700"
    )
    assert "as the user that the driver runs as" in fault.cure
    assert fault.lasting


async def test_another_protocol_is_told_apart_from_a_driver(bench: GatewayBench, tmp_path: Path) -> None:
    assert await protocol_fault(bench.config.compute_driver_socket) is None
    async with http1_server(tmp_path / "engine"):
        fault = await protocol_fault(tmp_path / "engine")
    assert fault is not None
    assert "not a compute driver" in fault.cause
    assert fault.lasting


async def test_a_start_on_the_engines_socket_ends_long_before_the_window(tmp_path: Path) -> None:
    of = config(tmp_path, window_seconds=3600)
    async with http1_server(of.compute_driver_socket), gateway(of) as running:
        with pytest.raises(DriverUnreachableError, match=r"not a compute driver.*--compute-driver-socket"):
            async with asyncio.timeout(60):
                await running.connect()


async def test_a_grpc_server_that_is_no_driver_is_refused(tmp_path: Path) -> None:
    of = config(tmp_path)
    other = grpc.aio.server()
    other.add_insecure_port(f"unix:{of.compute_driver_socket}")
    await other.start()
    async with gateway(of) as running:
        with pytest.raises(HandshakeError, match="is not a compute driver"):
            await running.connect()
    await other.stop(None)


async def test_while_it_waits_it_says_for_what(grpc_poller: None, tmp_path: Path) -> None:
    link = DriverLink(tmp_path / "driver.sock", policy=DriverPolicy())
    told: asyncio.Queue[SocketFault] = asyncio.Queue()
    connecting = asyncio.create_task(link.connect(window_seconds=3600, on_wait=told.put_nowait))
    assert (await told.get()).cause == "there is no such file"
    with pytest.raises(UnavailableError, match="has not answered yet: there is no such file; start the driver"):
        _ = link.identity
    connecting.cancel()
    await asyncio.gather(connecting, return_exceptions=True)
    await link.close()


async def test_a_window_that_passes_says_what_was_missing(tmp_path: Path) -> None:
    of = config(tmp_path, window_seconds=0.2)
    async with gateway(of) as running:
        with pytest.raises(DriverUnreachableError) as caught:
            await running.connect()
    assert caught.value.message == (
        f"the compute driver cannot be reached on its socket {of.compute_driver_socket} within 0.2 s: "
        "there is no such file; start the driver, or name its socket with --compute-driver-socket"
    )


async def test_a_caller_is_told_that_it_is_the_driver_that_is_away(bench: GatewayBench) -> None:
    await bench.driver.close()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.stub.CreateSandbox(
            pb.CreateSandboxRequest(name="beta", workspace_scope=WORKSPACE, spec=pb.SandboxSpec())
        )
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    text = caught.value.details() or ""
    assert text.startswith(f"the compute driver cannot be reached on its socket {bench.config.compute_driver_socket}: ")
    assert "start the driver" in text
    await bench.driver.serve(bench.config.compute_driver_socket)
    await bench.driver.watch_open(bench.driver.watches + 1)
    await bench.create("beta")


async def test_what_a_reachable_driver_answers_stays_its_own_words(bench: GatewayBench) -> None:
    bench.driver.failures["ValidateSandboxCreate"] = (grpc.StatusCode.UNAVAILABLE, "engine away")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.create("beta")
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAVAILABLE, "engine away")


async def test_a_driver_that_goes_away_within_a_create_was_asked_for_nothing(
    bench: GatewayBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    validate = DriverLink.validate

    async def validate_and_lose_it(self: DriverLink, sandbox: compute_driver_pb2.DriverSandbox) -> None:
        await validate(self, sandbox)
        await bench.driver.close()

    monkeypatch.setattr(DriverLink, "validate", validate_and_lose_it)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.create("beta")
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "cannot be reached" in (caught.value.details() or "")
    with pytest.raises(grpc.aio.AioRpcError, match="does not exist"):
        await bench.get("beta")


async def test_a_driver_that_stays_away_is_logged_once(
    grpc_poller: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = DriverLink(tmp_path / "driver.sock", policy=DriverPolicy())
    attempts = asyncio.Semaphore(0)
    watch = link.watch

    def counted() -> AbstractAsyncContextManager[AsyncIterator[compute_driver_pb2.WatchSandboxesEvent]]:
        attempts.release()
        return watch()

    monkeypatch.setattr(link, "watch", counted)
    timings = DriverTimings(watch_reopen_seconds=0)
    # Nothing is observed, so what it would be applied to is never touched.
    observer = DriverObserver(cast("SandboxStates", None), link, cast("Leftovers", None), timings)
    with capture_logs() as logs:
        following = asyncio.create_task(observer.follow())
        for _ in range(5):
            await attempts.acquire()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    await link.close()
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert "there is no such file" in logs[0]["error"]
