"""What surrounds every RPC: the caller's trace in the log, a line at debug level, the metrics, bytes that decode."""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import grpc
import structlog
from google.protobuf.message import DecodeError

from driver_docker.metrics import OTHER_METHOD, Metrics
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    Handler = grpc.RpcMethodHandler[Any, Any]

_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?")
_SERVICE: Final = pb.DESCRIPTOR.services_by_name["ComputeDriver"]
METHODS: Final = frozenset(method.name for method in _SERVICE.methods)
"""Methods that have a name in the metrics; every other is `other`."""


def trace_of(header: str | None) -> dict[str, str]:
    """The log fields of a W3C `traceparent`; empty where there is none or it is malformed."""
    match = _TRACEPARENT.fullmatch(header or "")
    if match is None or match[1] == "0" * 32 or match[2] == "0" * 16:
        return {}
    return {"trace_id": match[1], "parent_span_id": match[2]}


class RpcObserver(grpc.aio.ServerInterceptor):
    """Observes every RPC of a server.

    The trace is bound in the RPC's own context, so that a launch that goes on in the background keeps it.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._log = structlog.get_logger("rpc")

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        """Wrap the handler of one RPC."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        name = handler_call_details.method.rpartition("/")[2]
        method = name if name in METHODS else OTHER_METHOD
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                self._unary(handler.unary_unary, method),
                _reading(handler.request_deserializer),
                handler.response_serializer,
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(handler.unary_stream, method),
                _reading(handler.request_deserializer),
                handler.response_serializer,
            )
        return handler

    def _unary(self, behaviour: Callable[[Any, Any], Awaitable[Any]], method: str) -> Any:
        async def observed(request: Any, context: Any) -> Any:
            with self._around(context, method, timed=True):
                await _refuse_undecoded(request, context)
                return await behaviour(request, context)

        return observed

    def _stream(self, behaviour: Callable[[Any, Any], Any], method: str) -> Any:
        async def written(request: Any, context: Any) -> None:
            with self._around(context, method, timed=False):
                await _refuse_undecoded(request, context)
                await behaviour(request, context)

        async def yielded(request: Any, context: Any) -> AsyncIterator[Any]:
            with self._around(context, method, timed=False):
                await _refuse_undecoded(request, context)
                async for message in behaviour(request, context):
                    yield message

        return yielded if inspect.isasyncgenfunction(behaviour) else written

    @contextmanager
    def _around(self, context: Any, method: str, *, timed: bool) -> Iterator[None]:
        header = next((value for key, value in context.invocation_metadata() or () if key == "traceparent"), None)
        begun, status = time.perf_counter(), grpc.StatusCode.OK
        with structlog.contextvars.bound_contextvars(**trace_of(header if isinstance(header, str) else None)):
            try:
                yield
                status = _code(context, grpc.StatusCode.OK)
            except asyncio.CancelledError:
                status = grpc.StatusCode.CANCELLED
                raise
            except Exception:
                status = _code(context, grpc.StatusCode.UNKNOWN)
                raise
            finally:
                seconds = time.perf_counter() - begun
                self._metrics.rpcs.labels(method, status.name).inc()
                if timed:
                    self._metrics.rpc_seconds.labels(method).observe(seconds)
                self._log.debug("rpc", method=method, status=status.name, milliseconds=round(seconds * 1000, 1))


class _Undecoded:
    """Stands for a request whose bytes are none, until its handler can say so: the library would answer UNKNOWN."""


def _reading(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserialize is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _Undecoded()

    return read


async def _refuse_undecoded(request: Any, context: Any) -> None:
    if isinstance(request, _Undecoded):
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            "the request cannot be decoded: it is not this method's protobuf message, or it is nested too deeply",
        )


def _code(context: Any, default: grpc.StatusCode) -> grpc.StatusCode:
    """The status that a handler or an abort has set."""
    told = context.code()
    if isinstance(told, grpc.StatusCode):
        return told
    by_number = {code.value[0]: code for code in grpc.StatusCode}
    found: grpc.StatusCode = by_number.get(told, default) if isinstance(told, int) and told else default
    return found
