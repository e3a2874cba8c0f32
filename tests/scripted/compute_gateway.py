"""A gateway as a compute driver sees it: shakes hands, launches sandboxes, watches, over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from openshell.isolation.documents import AuthBundle, LaunchAuthentication, VerificationKey
from openshell.wire.compute.v1 import compute_driver_pb2 as pb
from openshell.wire.compute.v1 import compute_driver_pb2_grpc as pb_grpc
from openshell.wire.extension.v1 import extension_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

CONTRACT = "openshell.compute.contract"
SECRET = "eyJhbGciOiJFZERTQSJ9.c2VjcmV0LXRva2VuLXZhbHVl.c2lnbmF0dXJl"


def peer(**overrides: Any) -> extension_pb2.PeerMetadata:
    """The metadata of a gateway that fits."""
    values: dict[str, Any] = {
        "protocol_version": extension_pb2.ProtocolVersion(major=1, minor=0),
        "implementation_name": "openshell/gateway",
        "implementation_version": "0.1.5",
        "supported_capabilities": [CONTRACT],
        "required_capabilities": [CONTRACT],
    }
    return extension_pb2.PeerMetadata(**(values | overrides))


def launch_authentication(*, generation: str = "g-1") -> LaunchAuthentication:
    """Credentials of one launch; the tokens are not valid anywhere, but recognisable."""
    key = Ed25519PrivateKey.generate().public_key()
    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    return LaunchAuthentication(
        supervisor=AuthBundle(
            session_id=str(uuid.uuid4()),
            runtime_generation=generation,
            session_rotation=1,
            auth_epoch=1,
            gateway_token=SECRET,
            gateway_expires_at=0,
            sandbox_token=SECRET[::-1].replace("=", ""),
            sandbox_expires_at=0,
        ),
        gateway_id="gateway-1",
        verification_keys=(VerificationKey(key_id="k1", public_key_pem=pem),),
    )


def sandbox(image: str, *, name: str = "steady", **template: Any) -> pb.DriverSandbox:
    """A sandbox that a driver should accept."""
    return pb.DriverSandbox(
        id=str(uuid.uuid4()),
        name=name,
        workspace="default",
        spec=pb.DriverSandboxSpec(
            template=pb.DriverSandboxTemplate(image=image, **template),
            launch_authentication=launch_authentication().to_json(),
        ),
    )


def private_key_pem(key: Ed25519PrivateKey) -> str:
    """A key as PKCS#8 PEM."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


@dataclass
class ComputeGateway:
    """A connection to a driver's socket with one watch, whose events are kept with the time of their arrival."""

    address: str
    events: list[tuple[float, pb.WatchSandboxesEvent]] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> Self:
        self.channel = grpc.aio.insecure_channel(self.address)
        self.stub: Any = pb_grpc.ComputeDriverStub(self.channel)
        self.call = self.stub.WatchSandboxes(pb.WatchSandboxesRequest(), wait_for_ready=True)
        await self.call.wait_for_connection()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await self._task
        await self.channel.close()

    async def _watch(self) -> None:
        async for event in self.call:
            self.events.append((time.time(), event))
            self._changed.set()
            self._changed = asyncio.Event()

    async def wait(
        self, wanted: Callable[[pb.WatchSandboxesEvent], bool], *, seconds: float = 30.0
    ) -> tuple[float, pb.WatchSandboxesEvent]:
        """The first event, seen or to come, that is wanted."""
        position = 0
        async with asyncio.timeout(seconds):
            while True:
                for entry in self.events[position:]:
                    if wanted(entry[1]):
                        return entry
                position = len(self.events)
                await self._changed.wait()

    async def wait_ready(self, sandbox_id: str, *, seconds: float = 30.0) -> pb.DriverSandbox:
        """The first snapshot of a sandbox that settles it: ready, or not ready for a reason other than Starting."""

        def settled(event: pb.WatchSandboxesEvent) -> bool:
            if event.WhichOneof("payload") != "sandbox" or event.sandbox.sandbox.id != sandbox_id:
                return False
            return ready(event.sandbox.sandbox).reason != "Starting"

        return (await self.wait(settled, seconds=seconds))[1].sandbox.sandbox

    async def wait_reason(self, sandbox_id: str, reason: str, *, seconds: float = 30.0) -> pb.DriverSandbox:
        """The first snapshot of a sandbox with this reason."""
        _, event = await self.wait(
            lambda event: (
                event.WhichOneof("payload") == "sandbox"
                and event.sandbox.sandbox.id == sandbox_id
                and ready(event.sandbox.sandbox).reason == reason
            ),
            seconds=seconds,
        )
        return event.sandbox.sandbox

    async def wait_deleted(self, sandbox_id: str, *, seconds: float = 30.0) -> None:
        """Until the deleted event of a sandbox."""
        await self.wait(lambda event: event.deleted.sandbox_id == sandbox_id, seconds=seconds)

    def platform_events(self, sandbox_id: str) -> list[pb.DriverPlatformEvent]:
        """The platform events of a sandbox so far."""
        return [event.platform_event.event for _, event in self.events if event.platform_event.sandbox_id == sandbox_id]


def ready(observed: pb.DriverSandbox) -> pb.DriverCondition:
    """The Ready condition of a snapshot."""
    return next(condition for condition in observed.status.conditions if condition.type == "Ready")
