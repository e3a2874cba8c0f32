"""Between grpc and the service: every RPC of the table, authenticated, with the contract's errors and metadata."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog
from google.protobuf import message_factory
from google.protobuf.message import DecodeError, Message

from gateway_embedded import status_details
from gateway_embedded.auth import Principal, SandboxPrincipal, authenticate
from gateway_embedded.errors import GatewayError, InvalidRequestError, NotBuiltError, UnauthenticatedError
from gateway_embedded.rpc_table import SERVICE_NAME, RpcEntry, rpc_table
from gateway_embedded.tokens import TokenAuthority
from openshell.schema import SCHEMA_METADATA_KEY, own_schema_sha256

Metadata = tuple[tuple[str, str | bytes], ...]
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True, kw_only=True)
class Call:
    """One call in progress."""

    principal: Principal
    reply_metadata: list[tuple[str, str]] = field(default_factory=list)
    """Added to the response's metadata."""

    @property
    def sandbox(self) -> SandboxPrincipal:
        """The calling supervisor.

        Raises:
            UnauthenticatedError: The caller is a user.
        """
        if not isinstance(self.principal, SandboxPrincipal):
            raise UnauthenticatedError("this call needs a sandbox's gateway token")
        return self.principal


UnaryHandler = Callable[[Any, Call], Awaitable[Message]]
StreamHandler = Callable[[Any, Call], AsyncIterator[Message]]
Handler = UnaryHandler | StreamHandler


class Dispatcher:
    """Builds the grpc handlers of the public service from a mapping of RPC names to handlers."""

    def __init__(self, handlers: Mapping[str, Handler], authority: TokenAuthority) -> None:
        built = {name for name, entry in rpc_table().items() if entry.built}
        if set(handlers) != built:
            raise ValueError(f"handlers and table differ: {sorted(set(handlers) ^ built)}")
        self._handlers = handlers
        self._authority = authority
        self._schema: tuple[str, str] = (SCHEMA_METADATA_KEY, own_schema_sha256())
        self._log = structlog.get_logger("gateway.api")

    def generic_handler(self) -> grpc.GenericRpcHandler:
        """The handler to register with a server."""
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME, {entry.name: self._method(entry) for entry in rpc_table().values()}
        )

    def _method(self, entry: RpcEntry) -> grpc.RpcMethodHandler[Any, Any]:
        makers = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }
        make: Callable[..., grpc.RpcMethodHandler[Any, Any]] = makers[entry.client_streaming, entry.server_streaming]
        response_type = message_factory.GetMessageClass(entry.descriptor.output_type)
        behaviour = self._streaming(entry) if entry.server_streaming else self._unary(entry)
        # Requests are decoded by `_decoded`: grpc itself would answer UNKNOWN to bytes that are no message.
        return make(behaviour, request_deserializer=None, response_serializer=response_type.SerializeToString)

    def _unary(self, entry: RpcEntry) -> Callable[[Any, Context], Awaitable[Message]]:
        async def behaviour(request: Any, context: Context) -> Message:
            try:
                call = self._admit(entry, context)
                handler: Any = self._handlers[entry.name]
                answer: Message = await handler(_decoded(entry, request), call)
            except GatewayError as error:
                await self._fail(entry, context, error)
            except Exception as error:
                await self._crash(entry, context, error)
            else:
                metadata = (self._schema, *call.reply_metadata)
                context.set_trailing_metadata(metadata)
                await context.send_initial_metadata(metadata)
                return answer
            raise AssertionError("unreachable: abort raises")

        return behaviour

    def _streaming(self, entry: RpcEntry) -> Callable[[Any, Context], Awaitable[None]]:
        async def behaviour(request: Any, context: Context) -> None:
            # Written, not yielded: a cancelled write then ends the handler here and now, not when it is collected.
            try:
                call = self._admit(entry, context)
                context.set_trailing_metadata((self._schema,))
                await context.send_initial_metadata((self._schema,))
                handler: Any = self._handlers[entry.name]
                given = _decoded_stream(entry, request) if entry.client_streaming else _decoded(entry, request)
                async with aclosing(handler(given, call)) as answers:
                    async for answer in answers:
                        await context.write(answer)
            except GatewayError as error:
                await self._fail(entry, context, error)
            except Exception as error:
                await self._crash(entry, context, error)

        return behaviour

    def _admit(self, entry: RpcEntry, context: Context) -> Call:
        if not entry.built:
            raise NotBuiltError(entry.refusal)
        metadata = context.invocation_metadata() or ()
        return Call(principal=authenticate(entry.auth_mode, ((k, v) for k, v in metadata), self._authority))

    async def _fail(self, entry: RpcEntry, context: Context, error: GatewayError) -> None:
        self._log.info("refused", rpc=entry.name, status=error.status.name, reason=error.reason, error=error.message)
        details = (status_details.DETAILS_KEY, status_details.encode(error))
        await context.abort(error.status.grpc, error.public_message, (self._schema, details))

    async def _crash(self, entry: RpcEntry, context: Context, error: Exception) -> None:
        if isinstance(error, grpc.aio.AbortError):
            raise error
        self._log.error("a call failed unexpectedly", rpc=entry.name, exc_info=error)
        await self._fail(entry, context, GatewayError(f"{entry.name} failed inside the gateway; its log says why"))


def _decoded(entry: RpcEntry, data: bytes) -> Message:
    request_type = message_factory.GetMessageClass(entry.descriptor.input_type)
    try:
        return request_type.FromString(data)
    except DecodeError as error:
        name = entry.descriptor.input_type.name
        raise InvalidRequestError(f"the request is not a readable {name} message") from error


async def _decoded_stream(entry: RpcEntry, stream: AsyncIterator[bytes]) -> AsyncIterator[Message]:
    async for data in stream:
        yield _decoded(entry, data)
