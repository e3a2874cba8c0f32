"""What the isolation channel costs: round trip and throughput through TLS, beside the same gRPC without it.

Run as ``python -m benchmarks.isolation_channel``; prints one JSON object, medians of the runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import socket
import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio

from openshell.isolation.channel import PhysicalChannel
from openshell.isolation.documents import TransportTls, UnixTransport
from openshell.isolation.grpc_options import client_options, server_options
from openshell.isolation.terminator import TlsTerminator
from openshell.isolation.tls import issue_session_tls, server_context

BLOCK = bytes(60_000)
MIB = 1024 * 1024
Context = grpc.aio.ServicerContext[bytes, bytes]


class _Echo(grpc.GenericRpcHandler):
    """``/b/echo`` answers its request, ``/b/down`` streams bytes, ``/b/up`` counts them."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        match handler_call_details.method:
            case "/b/echo":
                return grpc.unary_unary_rpc_method_handler(_echo)
            case "/b/down":
                return grpc.unary_stream_rpc_method_handler(_down)
            case "/b/up":
                return grpc.stream_unary_rpc_method_handler(_up)
        return None


async def _echo(request: bytes, context: Context) -> bytes:
    return request


async def _down(request: bytes, context: Context) -> AsyncIterator[bytes]:
    for _ in range(int(request)):
        yield BLOCK


async def _up(requests: AsyncIterator[bytes], context: Context) -> bytes:
    total = 0
    async for block in requests:
        total += len(block)
    return str(total).encode()


async def _measure(channel: grpc.aio.Channel, calls: int, mebibytes: int) -> dict[str, float]:
    echo: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/b/echo")
    down: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/b/down")
    up: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary("/b/up")
    blocks = mebibytes * MIB // len(BLOCK)
    for _ in range(20):
        await echo(b"x")
    trips = []
    for _ in range(calls):
        began = time.perf_counter()
        await echo(b"x")
        trips.append(time.perf_counter() - began)

    async def receive() -> None:
        async for _ in down(str(blocks).encode()):
            pass

    async def send() -> None:
        async def source() -> AsyncIterator[bytes]:
            for _ in range(blocks):
                yield BLOCK

        await up(source())

    return {
        "round_trip_ms": statistics.median(trips) * 1000,
        "down_mib_per_s": await _rate(receive, mebibytes),
        "up_mib_per_s": await _rate(send, mebibytes),
    }


async def _rate(transfer: Callable[[], Awaitable[None]], mebibytes: int) -> float:
    rates = []
    for _ in range(3):
        began = time.perf_counter()
        await transfer()
        rates.append(mebibytes / (time.perf_counter() - began))
    return statistics.median(rates)


async def _run(folder: Path, calls: int, mebibytes: int) -> dict[str, object]:
    inner = f"openshell-bench-{secrets.token_hex(8)}"
    server = grpc.aio.server(options=server_options())
    server.add_generic_rpc_handlers((_Echo(),))
    server.add_insecure_port(f"unix-abstract:{inner}")
    await server.start()
    tls = issue_session_tls(str(uuid.uuid4()))
    context = server_context(certificate_chain_pem=tls.certificate_chain_pem, private_key_pem=tls.private_key_pem)
    terminator = TlsTerminator(context, inner_name=inner, on_opened=lambda _: None, on_closed=lambda _: None)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "s"))
    listener.listen()
    terminator.start(listener)
    transport = UnixTransport(socket_path=str(folder / "s"))
    trust = TransportTls(server_name=tls.server_name, trust_anchor_pem=tls.trust_anchor_pem)
    connects = []
    for generation in range(10):
        began = time.perf_counter()
        probe = await PhysicalChannel.connect(transport, trust, generation=generation)
        connects.append(time.perf_counter() - began)
        await probe.close()
    channel = await PhysicalChannel.connect(transport, trust)
    through_tls = await _measure(channel.grpc, calls, mebibytes)
    await channel.close()
    async with grpc.aio.insecure_channel(f"unix-abstract:{inner}", client_options()) as plain:
        bare = await _measure(plain, calls, mebibytes)
    await server.stop(None)
    await terminator.close()
    return {"connect_ms": statistics.median(connects) * 1000, "through_tls": through_tls, "bare_grpc": bare}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--mebibytes", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(_run(Path(folder), arguments.calls, arguments.mebibytes)), indent=2))


if __name__ == "__main__":
    main()
