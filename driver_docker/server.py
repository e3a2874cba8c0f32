"""The gRPC service: decode, call, encode, status codes. Nothing else."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import grpc
import structlog

from driver_docker import encode
from driver_docker.errors import (
    DriverError,
    InvalidRequestError,
    PreconditionError,
    SandboxNotFoundError,
    public_text,
)
from driver_docker.older_generation import listener_requirements_handler
from driver_docker.open_rpcs import OpenRpcs
from driver_docker.requests import decode_launch, decode_sandbox
from driver_docker.sandbox_ids import is_sandbox_id
from openshell.wire.compute.v1 import compute_driver_pb2 as pb
from openshell.wire.compute.v1 import compute_driver_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from driver_docker.config import DriverConfig
    from driver_docker.lifecycle import Lifecycle
    from driver_docker.requests import LaunchRequest
    from driver_docker.services import Services
    from driver_docker.watch import WatchHub

Result = TypeVar("Result")
Context = grpc.aio.ServicerContext[Any, Any]

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""What a peer's library accepts by default (compute-driver contract 3.10)."""
MAX_CONCURRENT_RPCS = 256
_NAME_BYTES = 100
"""Most of a peer's own words that a log line takes."""

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Peers may ping an idle watch as often as every second without being sent away.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
)


class ComputeDriverService(pb_grpc.ComputeDriverServicer):
    """`openshell.compute.v1.ComputeDriver`."""

    def __init__(self, services: Services, lifecycle: Lifecycle, hub: WatchHub[pb.WatchSandboxesEvent]) -> None:
        self._config: DriverConfig = services.config
        self._services = services
        self._lifecycle = lifecycle
        self._hub = hub
        self.open_rpcs = OpenRpcs()
        self._capabilities = encode.capabilities(services.config, services.engine.info)
        self._log = structlog.get_logger("rpc")

    async def GetCapabilities(  # noqa: N802 - the contract's name
        self, request: pb.GetCapabilitiesRequest, context: Context
    ) -> pb.GetCapabilitiesResponse:
        """Shake hands; never asks the engine."""

        async def answer() -> pb.GetCapabilitiesResponse:
            peer = encode.peer(request.gateway) if request.HasField("gateway") else None
            log = self._log
            if peer is not None:
                log = log.bind(
                    gateway=public_text(peer.name, limit_bytes=_NAME_BYTES),
                    version=public_text(peer.version, limit_bytes=_NAME_BYTES),
                    protocol=f"{peer.protocol_major}.{peer.protocol_minor}",
                )
            try:
                self._services.handshake.shake(peer)
            except DriverError as error:
                log.info("gateway refused", error=error.public_message)
                raise
            log.info("gateway accepted", older_generation=self._older_gateway)
            return self._capabilities

        return await self._answer(context, answer())

    async def ValidateSandboxCreate(  # noqa: N802
        self, request: pb.ValidateSandboxCreateRequest, context: Context
    ) -> pb.ValidateSandboxCreateResponse:
        """Refuse what a create would refuse."""

        async def answer() -> pb.ValidateSandboxCreateResponse:
            await self._lifecycle.validate(self._decode(request))
            return pb.ValidateSandboxCreateResponse()

        return await self._answer(context, answer())

    async def CreateSandbox(  # noqa: N802
        self, request: pb.CreateSandboxRequest, context: Context
    ) -> pb.CreateSandboxResponse:
        """Accept a sandbox; it is launched in the background."""

        async def answer() -> pb.CreateSandboxResponse:
            await self._lifecycle.create(self._decode(request))
            return pb.CreateSandboxResponse()

        return await self._answer(context, answer())

    async def GetSandbox(self, request: pb.GetSandboxRequest, context: Context) -> pb.GetSandboxResponse:  # noqa: N802
        """The state of one sandbox."""

        async def answer() -> pb.GetSandboxResponse:
            _check_id(request.sandbox_id)
            snapshot = await self._lifecycle.get(sandbox_id=request.sandbox_id, name=request.name)
            return pb.GetSandboxResponse(sandbox=encode.sandbox(snapshot, older_gateway=self._older_gateway))

        return await self._answer(context, answer())

    async def ListSandboxes(  # noqa: N802
        self, request: pb.ListSandboxesRequest, context: Context
    ) -> pb.ListSandboxesResponse:
        """The state of all sandboxes."""

        async def answer() -> pb.ListSandboxesResponse:
            snapshots = await self._lifecycle.list()
            older = self._older_gateway
            return pb.ListSandboxesResponse(
                sandboxes=[encode.sandbox(snapshot, older_gateway=older) for snapshot in snapshots]
            )

        return await self._answer(context, answer())

    async def StartSandbox(self, request: pb.StartSandboxRequest, context: Context) -> pb.StartSandboxResponse:  # noqa: N802
        """Start a stopped sandbox."""

        async def answer() -> pb.StartSandboxResponse:
            _check_id(request.sandbox_id)
            if request.expected_runtime_identity:
                raise PreconditionError(
                    "expected_runtime_identity is set, but sandboxes of this driver have no runtime identity"
                )
            credentials = request.launch_authentication
            await self._lifecycle.start(
                sandbox_id=request.sandbox_id,
                name=request.name,
                generation=request.generation_id,
                launch=decode_launch(credentials) if credentials else None,
            )
            return pb.StartSandboxResponse()

        return await self._answer(context, answer())

    async def StopSandbox(self, request: pb.StopSandboxRequest, context: Context) -> pb.StopSandboxResponse:  # noqa: N802
        """Stop a sandbox and keep what a start needs."""

        async def answer() -> pb.StopSandboxResponse:
            _check_id(request.sandbox_id)
            await self._lifecycle.stop(sandbox_id=request.sandbox_id, name=request.name)
            return pb.StopSandboxResponse()

        return await self._answer(context, answer())

    async def DeleteSandbox(self, request: pb.DeleteSandboxRequest, context: Context) -> pb.DeleteSandboxResponse:  # noqa: N802
        """Remove a sandbox and everything of it."""

        async def answer() -> pb.DeleteSandboxResponse:
            if not _may_exist(request.sandbox_id):
                return pb.DeleteSandboxResponse(deleted=False)
            deleted = await self._lifecycle.delete(sandbox_id=request.sandbox_id, name=request.name)
            return pb.DeleteSandboxResponse(deleted=deleted)

        return await self._answer(context, answer())

    async def WatchSandboxes(  # type: ignore[override]  # noqa: N802 - written to, not yielded from
        self, request: pb.WatchSandboxesRequest, context: Context
    ) -> None:
        """Replay every sandbox, then tell what happens; ends only for a slow reader or at the driver's end."""

        async def snapshots() -> list[pb.WatchSandboxesEvent]:
            services, older = self._services, self._older_gateway
            await services.tell_untold(lambda event: context.write(encode.watch_event(event, older_gateway=older)))
            return [encode.watch_event(services.snapshot(each), older_gateway=older) for each in services.table]

        try:
            self.open_rpcs.admit_watch(context)
            with self._hub.subscribe() as reader:
                # At once: a client may wait for them before it takes the stream for open, and with no sandbox here
                # the first event may be hours away.
                await context.send_initial_metadata(())
                await reader.deliver(snapshots, context.write)
        except DriverError as error:
            await self._refuse(context, error)

    async def EnsureWorkspace(  # noqa: N802
        self, request: pb.EnsureWorkspaceRequest, context: Context
    ) -> pb.EnsureWorkspaceResponse:
        """Nothing to do on Docker (compute-driver contract 3.12)."""
        return pb.EnsureWorkspaceResponse()

    async def DeleteWorkspace(  # noqa: N802
        self, request: pb.DeleteWorkspaceRequest, context: Context
    ) -> pb.DeleteWorkspaceResponse:
        """Nothing to do on Docker (compute-driver contract 3.12)."""
        return pb.DeleteWorkspaceResponse()

    async def AuthenticateSandbox(  # noqa: N802
        self, request: pb.AuthenticateSandboxRequest, context: Context
    ) -> pb.AuthenticateSandboxResponse:
        """Not offered, as the capabilities say."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "sandbox authentication is not offered by the Docker driver")

    @property
    def _older_gateway(self) -> bool:
        return self._services.handshake.older

    def _decode(self, request: pb.CreateSandboxRequest | pb.ValidateSandboxCreateRequest) -> LaunchRequest:
        if not request.HasField("sandbox"):
            raise InvalidRequestError("sandbox is missing")
        return decode_sandbox(
            request.sandbox,
            namespace=self._services.owner.namespace,
            allow_driver_config=self._config.allow_driver_config,
        )

    async def _answer(self, context: Context, call: Coroutine[Any, Any, Result]) -> Result:
        try:
            return await self.open_rpcs.answer(call)
        except DriverError as error:
            await self._refuse(context, error)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._log.exception("rpc failed unexpectedly")
            await context.abort(
                grpc.StatusCode.INTERNAL, f"internal error of the driver ({type(error).__name__}); see its log"
            )

    @staticmethod
    async def _refuse(context: Context, error: DriverError) -> NoReturn:
        await context.abort(error.status.grpc, error.public_message)


def _may_exist(sandbox_id: str) -> bool:
    """Whether a sandbox with this id can be here; an empty one says that the name counts."""
    return not sandbox_id or is_sandbox_id(sandbox_id)


def _check_id(sandbox_id: str) -> None:
    """Refuse an id that no sandbox can have, before anything is looked up with it.

    Create and Validate call it malformed. To Get, Start, Stop and Delete it is an unknown sandbox like any other,
    absent for certain (compute-driver contract 3.8, 3.9, 5.13), so that a gateway with such a row can get rid of it.

    Raises:
        SandboxNotFoundError: It is none.
    """
    if not _may_exist(sandbox_id):
        raise SandboxNotFoundError(f"sandbox {sandbox_id[:200]!r} does not exist here: no sandbox can have this id")


def make_server(
    service: ComputeDriverService, *, interceptors: tuple[grpc.aio.ServerInterceptor, ...] = ()
) -> grpc.aio.Server:
    """A server with explicit limits, not yet bound.

    Args:
        service: What is served.
        interceptors: What surrounds every RPC, outermost first.
    """
    server = grpc.aio.server(
        interceptors=interceptors, options=SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS
    )
    pb_grpc.add_ComputeDriverServicer_to_server(service, server)
    server.add_generic_rpc_handlers((listener_requirements_handler(),))
    return server
