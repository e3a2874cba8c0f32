"""The handshake over a real socket, with no engine behind it at all."""

from __future__ import annotations

import secrets
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn, cast

import grpc
import pytest
import structlog
from google.protobuf import empty_pb2
from scripted.compute_gateway import CONTRACT, peer
from structlog.testing import capture_logs

from driver_docker import encode, events
from driver_docker.config_sources import load_config
from driver_docker.engine_objects import EngineInfo
from driver_docker.handshake import Handshake
from driver_docker.labels import Owner
from driver_docker.launch_gate import LaunchGate
from driver_docker.records import RecordStore
from driver_docker.sandboxes import SandboxTable
from driver_docker.server import ComputeDriverService, make_server
from driver_docker.services import Services
from driver_docker.watch import WatchHub
from openshell.wire.compute.v1 import compute_driver_pb2 as pb
from openshell.wire.compute.v1 import compute_driver_pb2_grpc as pb_grpc
from openshell.wire.extension.v1 import extension_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from driver_docker.engine import Engine
    from driver_docker.lifecycle import Lifecycle


class NoEngine:
    """Fails whoever asks it; only what was learnt when it was connected is there."""

    info = EngineInfo(version="20.10", api_version="1.41", operating_system="linux", architecture="x86_64")

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"the engine was asked for {name}")


class Facing:
    """A service on a socket, seen by a gateway."""

    def __init__(self, channel: grpc.aio.Channel, services: Services, hub: WatchHub[pb.WatchSandboxesEvent]) -> None:
        self.channel = channel
        self.stub: Any = pb_grpc.ComputeDriverStub(channel)
        self.services = services
        self.hub = hub


@asynccontextmanager
async def _facing(folder: Path, **changes: Any) -> AsyncIterator[Facing]:
    config = load_config({"bind_socket": folder / "d.sock", "state_dir": folder / "state"} | changes, environment={})
    handshake = Handshake(config.older_gateways)
    engine = cast("Engine", NoEngine())
    hub: WatchHub[pb.WatchSandboxesEvent] = WatchHub()
    services = Services(
        engine=engine,
        config=config,
        owner=Owner(namespace="default", driver="d"),
        store=RecordStore(folder / "state"),
        table=SandboxTable(),
        handshake=handshake,
        gate=LaunchGate(engine, config, handshake),
        publish=lambda event: hub.publish(encode.watch_event(event, older_gateway=handshake.older)),
        watched=lambda: hub.reader_count > 0,
    )
    services.store.open()
    server = make_server(ComputeDriverService(services, cast("Lifecycle", None), hub))
    address = f"unix-abstract:handshake-{secrets.token_hex(8)}"
    server.add_insecure_port(address)
    await server.start()
    channel = grpc.aio.insecure_channel(address)
    try:
        yield Facing(channel, services, hub)
    finally:
        await channel.close()
        hub.close()
        await server.stop(None)
        services.disk.close()


async def _refusal(facing: Facing, request: pb.GetCapabilitiesRequest) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await facing.stub.GetCapabilities(request)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    return str(refused.value.details())


async def test_the_handshake_never_asks_the_engine_and_always_answers_the_same(tmp_path: Path) -> None:
    async with _facing(tmp_path) as facing:
        request = pb.GetCapabilitiesRequest(gateway=peer())
        answers = [await facing.stub.GetCapabilities(request) for _ in range(3)]
        assert len({answer.SerializeToString(deterministic=True) for answer in answers}) == 1
        extension = answers[0].extension
        assert (extension.protocol_version.major, extension.protocol_version.minor) == (1, 0)
        assert list(extension.required_capabilities) == [CONTRACT]
        assert not answers[0].supports_sandbox_authentication
        assert not answers[0].driver_reports_runtime_readiness
        assert facing.services.handshake.peer is not None
        assert facing.services.handshake.peer.version == "0.1.5"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"protocol_version": extension_pb2.ProtocolVersion(major=2)}, "2.0"),
        ({"protocol_version": None}, "0.0"),
        ({"supported_capabilities": []}, CONTRACT),
        ({"supported_capabilities": [CONTRACT, CONTRACT]}, "twice"),
        ({"supported_capabilities": [CONTRACT, "Openshell.a.b"]}, "malformed"),
        ({"required_capabilities": [CONTRACT, "openshell.gateway.magic"]}, "openshell.gateway.magic"),
        ({"implementation_name": " "}, "name"),
        ({"implementation_version": ""}, "version"),
        ({"implementation_version": "1\n2"}, "version"),
    ],
)
async def test_what_does_not_fit_is_failed_precondition(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    """Field report 25: the exact status is part of the contract."""
    async with _facing(tmp_path) as facing:
        assert word in await _refusal(facing, pb.GetCapabilitiesRequest(gateway=peer(**changes)))


async def test_a_gateway_without_metadata_is_refused_by_default(tmp_path: Path) -> None:
    async with _facing(tmp_path) as facing:
        assert "no gateway metadata" in await _refusal(facing, pb.GetCapabilitiesRequest())


async def test_every_handshake_leaves_a_line(tmp_path: Path) -> None:
    structlog.reset_defaults()  # whoever ran a command before this has set its threshold
    with capture_logs() as lines:
        async with _facing(tmp_path) as facing:
            await facing.stub.GetCapabilities(pb.GetCapabilitiesRequest(gateway=peer()))
            await _refusal(facing, pb.GetCapabilitiesRequest())
    accepted, refused = lines
    assert (accepted["event"], accepted["log_level"], accepted["version"]) == ("gateway accepted", "info", "0.1.5")
    assert (refused["event"], "no gateway metadata" in refused["error"]) == ("gateway refused", True)


async def test_an_older_gateway_is_served_in_its_own_fields_where_the_operator_admits_it(tmp_path: Path) -> None:
    time = datetime(2026, 8, 21, tzinfo=UTC)
    async with _facing(tmp_path, older_gateways="serve") as facing:
        answer = await facing.stub.GetCapabilities(pb.GetCapabilitiesRequest())
        assert answer.driver_name == "docker"
        call = facing.stub.WatchSandboxes(pb.WatchSandboxesRequest())
        await call.initial_metadata()
        facing.services.publish(events.scheduled("s1", time, image="i"))
        assert b"\x08" + _varint(int(time.timestamp() * 1000)) in (await call.read()).SerializeToString()
        await facing.stub.GetCapabilities(pb.GetCapabilitiesRequest(gateway=peer()))
        facing.services.publish(events.scheduled("s1", time, image="i"))
        assert b"\x08" + _varint(int(time.timestamp() * 1000)) not in (await call.read()).SerializeToString()
        call.cancel()


def _varint(value: int) -> bytes:
    groups = [value >> shift & 0x7F for shift in range(0, value.bit_length(), 7)]
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])


async def test_the_listeners_that_an_older_gateway_asks_for_are_none(tmp_path: Path) -> None:
    async with _facing(tmp_path) as facing:
        ask = facing.channel.unary_unary(
            "/openshell.compute.v1.ComputeDriver/GetGatewayListenerRequirements",
            request_serializer=empty_pb2.Empty.SerializeToString,
            response_deserializer=bytes,
        )
        assert await ask(empty_pb2.Empty()) == b""


async def test_sandbox_authentication_is_unimplemented_as_the_capabilities_say(tmp_path: Path) -> None:
    async with _facing(tmp_path) as facing:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await facing.stub.AuthenticateSandbox(pb.AuthenticateSandboxRequest(credential="c"))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        for rpc, request in (
            (facing.stub.EnsureWorkspace, pb.EnsureWorkspaceRequest(workspace="w")),
            (facing.stub.DeleteWorkspace, pb.DeleteWorkspaceRequest(workspace="w")),
        ):
            await rpc(request)
