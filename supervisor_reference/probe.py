"""The readiness probe: ``health --socket PATH``.

Runs every 250 ms in a container that is coming up, so it imports nothing but the socket module and must be dispatched
before anything else is imported.
"""

from __future__ import annotations

import socket
import sys

READY_ANSWER = b"ready\n"
"""What the readiness listener says to whoever connects."""

_TIMEOUT_SECONDS = 1.5


def probe(arguments: list[str]) -> int:
    """Ask the readiness listener whether the supervisor is ready.

    Args:
        arguments: What followed ``health`` on the command line: ``--socket PATH`` or ``--socket=PATH``.

    Returns:
        0 when it is ready, 1 when it is not, 64 when the command line is wrong.
    """
    if len(arguments) == 2 and arguments[0] == "--socket":
        path = arguments[1]
    elif len(arguments) == 1 and arguments[0].startswith("--socket="):
        path = arguments[0].removeprefix("--socket=")
    else:
        sys.stderr.write("usage: openshell-supervisor health --socket PATH\n")
        return 64
    return 0 if _is_ready(path) else 1


def _is_ready(path: str) -> bool:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TIMEOUT_SECONDS)
            connection.connect(path)
            answer = b""
            while len(answer) < len(READY_ANSWER):
                part = connection.recv(len(READY_ANSWER) - len(answer))
                if not part:
                    break
                answer += part
    except (OSError, ValueError):
        # ValueError: a path with a null byte.
        return False
    return answer == READY_ANSWER
