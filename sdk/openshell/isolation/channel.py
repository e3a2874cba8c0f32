"""The physical connection under the Sandbox Protocol, as a client holds it.

grpcio can neither verify an Ed25519 leaf nor be kept from reconnecting, so TLS is spoken here and the gRPC channel
talks plaintext HTTP/2 to a local socket that takes exactly one connection: the one that the TLS connection is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import ssl
import struct

import grpc.aio

from openshell.isolation.endpoints import TcpTransport, Transport, TransportTls, UnixTransport, check_socket_address
from openshell.isolation.errors import DescriptorError, DocumentError, TransportLostError, cause_of
from openshell.isolation.grpc_options import client_options
from openshell.isolation.relay import Relay, RelaySide
from openshell.isolation.tls import ALPN, client_context

HANDSHAKE_SECONDS = 5.0
"""Limit of connecting, of the TLS handshake, and of the local connection, each."""

_CREDENTIALS = struct.Struct("3i")


class PhysicalChannel:
    """One authenticated TLS connection with a gRPC channel on it; connects once and never reconnects.

    Attributes:
        generation: counter that tells this connection from earlier and later ones.
        closed: set once the physical connection is gone, for whatever reason.
        grpc: the channel to make stubs from.
    """

    def __init__(self, *, generation: int, relay: Relay, local: socket.socket, channel: grpc.aio.Channel) -> None:
        self.generation = generation
        self.closed = relay.closed
        self.grpc = channel
        self._relay = relay
        self._local = local

    @classmethod
    async def connect(cls, transport: Transport, tls: TransportTls, *, generation: int = 1) -> PhysicalChannel:
        """Connect, check the server's certificate and name, and offer the gRPC channel.

        Args:
            transport: where the boundary listens.
            tls: the pinned trust anchor and the server's name.
            generation: number of this connection among its client's.

        Raises:
            TransportLostError: nothing answers, or the handshake failed or took longer than 5 s.
            DescriptorError: the trust anchor or the transport cannot be used.
        """
        relay = Relay()
        await _connect_tls(relay.outer, transport, tls)
        local = _reserve_local()
        channel = grpc.aio.insecure_channel(f"unix-abstract:{local.getsockname()[1:].decode()}", client_options())
        physical = cls(generation=generation, relay=relay, local=local, channel=channel)
        try:
            await _take_one_connection(relay.inner, local, channel)
        except BaseException:
            await physical.close()
            raise
        relay.join()
        return physical

    async def close(self) -> None:
        """Cut the physical connection and release everything; idempotent."""
        self._relay.abort()
        await self._relay.released.wait()
        await self.grpc.close()
        # Last, so that nobody else can listen under the name while the channel still knows it.
        self._local.close()


async def _connect_tls(outer: RelaySide, transport: Transport, tls: TransportTls) -> None:
    try:
        context = client_context(trust_anchor_pem=tls.trust_anchor_pem)
    except DocumentError as error:
        raise DescriptorError(error.message) from None
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            connected = await _open(outer, transport, context, tls.server_name)
    except TimeoutError:
        raise TransportLostError(f"no TLS handshake within {HANDSHAKE_SECONDS:.0f} seconds") from None
    except ssl.SSLCertVerificationError as error:
        raise TransportLostError(f"the boundary's certificate was refused: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise TransportLostError(f"TLS handshake failed: {error.reason or 'connection ended'}") from None
    except OSError as error:
        raise TransportLostError(f"cannot connect to {_place(transport)}: {cause_of(error)}") from None
    tls_object = connected.get_extra_info("ssl_object")
    if tls_object is None or tls_object.selected_alpn_protocol() != ALPN:
        connected.abort()
        raise TransportLostError("the boundary does not speak HTTP/2 (ALPN h2)")


async def _open(outer: RelaySide, transport: Transport, context: ssl.SSLContext, server_name: str) -> asyncio.Transport:
    loop = asyncio.get_running_loop()
    if isinstance(transport, UnixTransport):
        connected, _ = await loop.create_unix_connection(
            lambda: outer,
            transport.socket_path,
            ssl=context,
            server_hostname=server_name,
            ssl_handshake_timeout=HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=1.0,
        )
        return connected
    if isinstance(transport, TcpTransport):
        failure: OSError = ConnectionRefusedError("no address")
        for address in transport.addresses:
            host, port = check_socket_address(address, "transport.addresses")
            try:
                connected, _ = await loop.create_connection(
                    lambda: outer,
                    host,
                    port,
                    ssl=context,
                    server_hostname=server_name,
                    ssl_handshake_timeout=HANDSHAKE_SECONDS,
                    ssl_shutdown_timeout=1.0,
                )
            except ssl.SSLError:
                raise
            except OSError as error:
                failure = error
            else:
                return connected
        raise failure
    raise DescriptorError("vsock transports are not offered yet; use unix or tcp")


def _place(transport: Transport) -> str:
    if isinstance(transport, UnixTransport):
        return transport.socket_path
    if isinstance(transport, TcpTransport):
        return ", ".join(transport.addresses)
    return f"vsock {transport.guest_cid}:{transport.port}"


def _reserve_local() -> socket.socket:
    local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        local.setblocking(False)
        local.bind(f"\0openshell-{secrets.token_hex(16)}")
        local.listen(1)
    except BaseException:
        local.close()
        raise
    return local


async def _take_one_connection(inner: RelaySide, local: socket.socket, channel: grpc.aio.Channel) -> None:
    """Accept the channel's one connection, then refuse every later one while the name stays ours."""
    loop = asyncio.get_running_loop()
    channel.get_state(try_to_connect=True)
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            while True:
                accepted, _ = await loop.sock_accept(local)
                if _is_ourselves(accepted):
                    break
                accepted.close()
    except TimeoutError:
        raise TransportLostError("the local gRPC channel did not connect") from None
    # Connects are refused from here on, and nobody else can bind the name.
    with contextlib.suppress(OSError):
        local.shutdown(socket.SHUT_RDWR)
    try:
        await loop.connect_accepted_socket(lambda: inner, accepted)
    except BaseException:
        accepted.close()
        raise


def _is_ourselves(accepted: socket.socket) -> bool:
    raw = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, _, _ = _CREDENTIALS.unpack(raw)
    return bool(pid == os.getpid())
