from __future__ import annotations

import pytest

from openshell._endpoint import Endpoint
from openshell.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("text", "authority", "shown", "loopback"),
    [
        ("http://127.0.0.1:17670", "127.0.0.1:17670", "http://127.0.0.1:17670", True),
        ("http://[::1]:8080", "[::1]:8080", "http://[::1]:8080", True),
        ("https://gateway.example", "gateway.example:443", "https://gateway.example:443", False),
        ("http://localhost", "localhost:80", "http://localhost:80", True),
        ("http://LOCALHOST:1/", "localhost:1", "http://localhost:1", True),
        ("http://0.0.0.0:1", "0.0.0.0:1", "http://0.0.0.0:1", False),
        ("http://[::]:1", "[::]:1", "http://[::]:1", False),
        ("http://127.attacker.example:1", "127.attacker.example:1", "http://127.attacker.example:1", False),
    ],
)
def test_addresses_keep_their_brackets_and_know_their_reach(
    text: str, authority: str, shown: str, loopback: bool
) -> None:
    found = Endpoint.parse(text)
    assert (found.authority, str(found), found.is_loopback) == (authority, shown, loopback)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("127.0.0.1:80", "http://"),
        ("ftp://x", "http://"),
        ("http://", "no host"),
        ("http://x:0", "port 0"),
        ("http://x:65536", "ort"),
        ("http://x:-1", "ort"),
        ("http://x:8_0", "ort"),
        ("http://u:p@x", "credentials"),
        ("http://x/path", "only"),
        ("http://x?q", "only"),
        ("http://[::1", "endpoint"),
    ],
)
def test_bad_addresses_are_refused_with_the_problem(text: str, problem: str) -> None:
    with pytest.raises(InvalidArgumentError, match=problem) as caught:
        Endpoint.parse(text)
    assert "u:p" not in str(caught.value)
