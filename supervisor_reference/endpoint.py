"""Where the gateway is, and whether anybody listens there."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from supervisor_reference.errors import LaunchInputError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_DEFAULT_PORTS: Final[dict[str, int]] = {"http": 80, "https": 443}
_CAUSES: Final[dict[int, str]] = {
    errno.ECONNREFUSED: "connection refused",
    errno.EHOSTUNREACH: "no route to the host",
    errno.ENETUNREACH: "the network is unreachable",
    errno.ETIMEDOUT: "connection timed out",
    errno.ECONNRESET: "connection reset by the other side",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayEndpoint:
    """A gateway's address and what its TLS needs."""

    url: str
    host: str
    port: int
    tls: bool
    ca_file: Path | None = None
    """CA certificates that the gateway's certificate must chain to; None means the system's."""
    certificate_file: Path | None = None
    key_file: Path | None = None
    server_name: str | None = None
    """Name to expect in the gateway's certificate where it is not the host."""

    @property
    def target(self) -> str:
        """The address in gRPC's form."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_endpoint(url: str, files: Mapping[str, Path], *, server_name: str | None = None) -> GatewayEndpoint:
    """Parse ``OPENSHELL_ENDPOINT``.

    Args:
        url: ``http://host[:port]`` or ``https://host[:port]``, without user, path or query.
        files: TLS files by role: ``ca``, ``certificate``, ``key``; missing roles are absent.
        server_name: Name to expect in the certificate, when it differs from the host.

    Raises:
        LaunchInputError: The address cannot be used, or TLS files contradict it.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
        host = parts.hostname
    except ValueError as error:
        raise LaunchInputError("OPENSHELL_ENDPOINT is not a valid URL") from error
    if parts.scheme not in _DEFAULT_PORTS or not host:
        raise LaunchInputError("OPENSHELL_ENDPOINT must be http://host:port or https://host:port")
    if parts.username or parts.password or parts.query or parts.fragment or parts.path not in {"", "/"}:
        raise LaunchInputError("OPENSHELL_ENDPOINT may hold a scheme, a host and a port, and nothing else")
    tls = parts.scheme == "https"
    if not tls and (files or server_name):
        raise LaunchInputError("TLS settings were given for a gateway endpoint without TLS")
    if ("certificate" in files) != ("key" in files):
        raise LaunchInputError("OPENSHELL_TLS_CERT and OPENSHELL_TLS_KEY belong together; one of them is missing")
    chosen_port = _DEFAULT_PORTS[parts.scheme] if port is None else port
    if chosen_port == 0:
        raise LaunchInputError("OPENSHELL_ENDPOINT names port 0")
    return GatewayEndpoint(
        url=url.rstrip("/"),
        host=host,
        port=chosen_port,
        tls=tls,
        ca_file=files.get("ca"),
        certificate_file=files.get("certificate"),
        key_file=files.get("key"),
        server_name=server_name,
    )


async def unreachable_because(endpoint: GatewayEndpoint, *, limit_seconds: float) -> str | None:
    """Try to open a connection and close it again.

    Args:
        endpoint: The gateway.
        limit_seconds: How long the attempt may take.

    Returns:
        None when somebody listens, else the concrete cause, for example ``connection refused``.
    """
    try:
        async with asyncio.timeout(limit_seconds):
            _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    except TimeoutError:
        return f"no answer within {limit_seconds:g} s"
    except socket.gaierror:
        return f"the name {endpoint.host} cannot be resolved"
    except OSError as error:
        return _cause(error)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return None


def _cause(error: OSError) -> str:
    number = error.errno
    if number is None:
        # A name with several addresses: asyncio joins the texts of all attempts into one error without a number.
        return str(error) or "connection failed"
    return _CAUSES.get(number) or os.strerror(number).lower()
