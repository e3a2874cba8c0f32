"""The call layer: every RPC of ``openshell.v1`` over grpcio, with betterproto2 messages and our own errors."""

from __future__ import annotations

import functools
import math
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

import grpc
from google.protobuf.message_factory import GetMessageClass

import openshell.sandbox.v1
import openshell.v1
from openshell._decode import decode
from openshell._endpoint import ChannelOptions, Endpoint, TlsConfig, channel_arguments, channel_credentials
from openshell.errors import ClientClosedError, InvalidArgumentError, OpenShellError, RpcError
from openshell.status import StatusCode
from openshell.wire.v1 import openshell_pb2

if TYPE_CHECKING:
    from types import ModuleType, TracebackType

    import betterproto2
    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message as WireMessage

M = TypeVar("M", bound="betterproto2.Message")

TokenSource = str | Callable[[], str]
"""A bearer token, or a function that returns a fresh one for each call."""

_LONGEST_DEADLINE_SECONDS = 10 * 365 * 86_400.0
"""grpc takes a deadline that is much further away, or infinite, for one that has passed."""

_TOKEN = re.compile(r"[\x21-\x7e]+")

_SERVICE = openshell_pb2.DESCRIPTOR.services_by_name["OpenShell"]
_PACKAGES: dict[str, ModuleType] = {"openshell.v1": openshell.v1, "openshell.sandbox.v1": openshell.sandbox.v1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rpc:
    """One RPC as the contract declares it."""

    name: str
    path: str
    request: type[betterproto2.Message]
    response: type[betterproto2.Message]
    response_wire: type[WireMessage]
    streams_response: bool


@functools.cache
def rpc(name: str) -> Rpc:
    """The RPC of that name.

    Raises:
        InvalidArgumentError: The contract has no such RPC.
    """
    method = _SERVICE.methods_by_name.get(name)
    if method is None:
        raise InvalidArgumentError(f"openshell.v1.OpenShell has no RPC {name!r}")
    return Rpc(
        name=name,
        path=f"/{_SERVICE.full_name}/{name}",
        request=_message_type(method.input_type),
        response=_message_type(method.output_type),
        response_wire=GetMessageClass(method.output_type),
        streams_response=bool(method.server_streaming),
    )


def _message_type(descriptor: Descriptor) -> type[betterproto2.Message]:
    found: type[betterproto2.Message] = getattr(_PACKAGES[descriptor.file.package], descriptor.name)
    return found


def deadline_of(seconds: float) -> float | None:
    """A timeout as grpc takes it: never negative, and None where it is too long to matter.

    Raises:
        InvalidArgumentError: It is not a number.
    """
    if math.isnan(seconds):
        raise InvalidArgumentError("timeout_seconds is not a number (NaN); use float('inf') for no limit")
    return None if seconds > _LONGEST_DEADLINE_SECONDS else max(seconds, 0.0)


class _OpenStream(Protocol):
    """What is used of a grpc response iterator."""

    def __iter__(self) -> Iterator[bytes]: ...

    def cancel(self) -> object: ...


class Connection:
    """A channel to one gateway. Threads may share it; close it, or use it in a ``with`` block."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        tls: TlsConfig | None,
        token: TokenSource | None,
        options: ChannelOptions,
        timeout_seconds: float,
    ) -> None:
        """Prepare the channel; grpc connects at the first call.

        Raises:
            InvalidArgumentError: A token would cross the network in plain text, or a TLS file cannot be used.
        """
        if token is not None and not endpoint.secure and not endpoint.is_loopback:
            raise InvalidArgumentError(
                f"refusing to send a token in plain text to {endpoint}; use an https:// endpoint"
            )
        self.endpoint = endpoint
        self._token = token
        self.timeout_seconds = timeout_seconds
        self._closed = False
        arguments = channel_arguments(options)
        self._channel = (
            grpc.secure_channel(endpoint.authority, channel_credentials(tls), options=arguments)
            if endpoint.secure
            else grpc.insecure_channel(endpoint.authority, options=arguments)
        )

    def unary(self, name: str, request: betterproto2.Message, answer: type[M], *, timeout_seconds: float | None) -> M:
        """Call a unary RPC and return its decoded answer.

        Args:
            name: The RPC, for example ``GetSandbox``.
            request: Its request message.
            answer: The type of its response message.
            timeout_seconds: Deadline of this call; None takes the client's default.

        Raises:
            InvalidArgumentError: The request, the timeout or the token cannot be sent.
            ClientClosedError: The client was closed.
            RpcError: The gateway answered a status other than OK or was not reached.
            MalformedResponseError: The answer is not the promised message.
        """
        described = self._checked(name, request, answer)
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(described.path)
        timeout = deadline_of(self.timeout_seconds if timeout_seconds is None else timeout_seconds)
        encoded, metadata = _encoded(name, request), self._metadata()
        try:
            payload: bytes = call(encoded, timeout=timeout, metadata=metadata)
        except grpc.RpcError as error:
            raise self._translated(name, error) from error
        return decode(payload, described.response_wire, answer, source=f"{name} at {self.endpoint}")

    def stream(
        self, name: str, request: betterproto2.Message, answer: type[M], *, timeout_seconds: float | None
    ) -> ResponseStream[M]:
        """Open a server stream; it has no deadline unless one is given.

        Raises:
            InvalidArgumentError: The request, the timeout or the token cannot be sent.
            ClientClosedError: The client was closed.
        """
        described = self._checked(name, request, answer)
        call: grpc.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(described.path)
        timeout = None if timeout_seconds is None else deadline_of(timeout_seconds)
        opened = call(_encoded(name, request), timeout=timeout, metadata=self._metadata())

        def decoded(payload: bytes) -> M:
            return decode(payload, described.response_wire, answer, source=f"{name} at {self.endpoint}")

        return ResponseStream(opened, decoded, functools.partial(self._translated, name))

    def close(self) -> None:
        """End every call and the connection."""
        self._closed = True
        self._channel.close()

    def _checked(self, name: str, request: betterproto2.Message, answer: type[M]) -> Rpc:
        if self._closed:
            raise ClientClosedError(f"{name} at {self.endpoint}: the client was closed; open a new one")
        described = rpc(name)
        if not isinstance(request, described.request):
            raise InvalidArgumentError(f"{name} takes {described.request.__name__}, not {type(request).__name__}")
        if answer is not described.response:
            raise InvalidArgumentError(f"{name} answers {described.response.__name__}, not {answer.__name__}")
        return described

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        if self._token is None:
            return ()
        token = self._token if isinstance(self._token, str) else self._token()
        if not _TOKEN.fullmatch(token):
            # Never its text: a token in an error is a token in a log.
            raise InvalidArgumentError("the bearer token is empty, or not printable ASCII without blanks and line ends")
        return (("authorization", f"Bearer {token}"),)

    def _translated(self, name: str, error: grpc.RpcError) -> RpcError:
        # Every error that grpcio raises from a call answers these two; its stubs do not say so.
        code: grpc.StatusCode = getattr(error, "code", lambda: grpc.StatusCode.UNKNOWN)()
        detail: str | None = getattr(error, "details", lambda: str(error))()
        return RpcError.from_status(name, StatusCode.from_grpc(code), detail or "", endpoint=str(self.endpoint))


def _encoded(name: str, request: betterproto2.Message) -> bytes:
    try:
        return bytes(request)
    except (TypeError, ValueError, AttributeError, ArithmeticError, struct.error) as error:
        raise InvalidArgumentError(f"{name}: a value of the request has the wrong type or range: {error}") from error


class ResponseStream(Generic[M]):
    """Messages of a server stream. Iterate it; `cancel` or leaving a ``with`` block ends it."""

    def __init__(
        self,
        call: _OpenStream,
        decoded: Callable[[bytes], M],
        translated: Callable[[grpc.RpcError], OpenShellError],
    ) -> None:
        """Wrap an opened grpc call."""
        self._call = call
        self._decoded = decoded
        self._translated = translated
        self._cancelled = False

    def __iter__(self) -> Iterator[M]:
        """Yield messages until the gateway ends the stream or it is cancelled.

        Raises:
            RpcError: The stream ended with a status other than OK.
        """
        try:
            for payload in self._call:
                yield self._decoded(payload)
        except grpc.RpcError as error:
            if not self._cancelled:
                raise self._translated(error) from error

    def cancel(self) -> None:
        """End the stream from this side; safe from any thread and more than once."""
        self._cancelled = True
        self._call.cancel()

    def __enter__(self) -> Self:
        """The stream itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel what is left of it."""
        self.cancel()
