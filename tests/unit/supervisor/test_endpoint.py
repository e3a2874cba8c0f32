"""Where the gateway is, and why it does not answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from supervisor_reference.endpoint import parse_endpoint, unreachable_because


@pytest.mark.parametrize(
    ("url", "target", "tls"),
    [
        ("http://127.0.0.1:8080", "127.0.0.1:8080", False),
        ("http://gateway/", "gateway:80", False),
        ("https://gateway", "gateway:443", True),
        ("https://[::1]:9", "[::1]:9", True),
    ],
)
def test_parses_an_endpoint(url: str, target: str, tls: bool) -> None:
    endpoint = parse_endpoint(url, {"ca": Path("/ca.pem")} if tls else {})
    assert (endpoint.target, endpoint.tls) == (target, tls)
    assert endpoint.ca_file == (Path("/ca.pem") if tls else None)


async def test_a_listener_is_reachable() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await unreachable_because(parse_endpoint(f"http://127.0.0.1:{port}", {}), limit_seconds=5) is None
    refused = await unreachable_because(parse_endpoint(f"http://127.0.0.1:{port}", {}), limit_seconds=5)
    assert refused == "connection refused"


async def test_a_name_that_nobody_knows_is_told() -> None:
    cause = await unreachable_because(parse_endpoint("http://nowhere.invalid:1", {}), limit_seconds=20)
    assert cause == "the name nowhere.invalid cannot be resolved"
