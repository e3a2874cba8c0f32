"""The readiness probe: ``health --socket PATH``.

An engine starts it again and again in a container that is coming up, which costs more than the probe itself. So one
probe waits for readiness, for as long as the health check's limit of 2 s allows (compute-driver contract 5.7), and
answers a few milliseconds after it. It imports nothing but the socket module, and must be dispatched before anything
else is imported.
"""

from __future__ import annotations

import socket
import sys
import time

READY_ANSWER = b"ready\n"
"""What the readiness listener says to whoever connects."""

PATIENCE_SECONDS = 1.4
"""How long a probe waits for readiness; starting the probe takes its share of the limit too."""

_PAUSE_SECONDS = 0.005


def probe(arguments: list[str], *, patience_seconds: float = PATIENCE_SECONDS) -> int:
    """Wait until the readiness listener says that the supervisor is ready.

    Args:
        arguments: What followed ``health`` on the command line: ``--socket PATH`` or ``--socket=PATH``.
        patience_seconds: How long to wait.

    Returns:
        0 as soon as it is ready, 1 when it is not ready in time, 64 when the command line is wrong.
    """
    if len(arguments) == 2 and arguments[0] == "--socket":
        path = arguments[1]
    elif len(arguments) == 1 and arguments[0].startswith("--socket="):
        path = arguments[0].removeprefix("--socket=")
    else:
        sys.stderr.write("usage: openshell-supervisor health --socket PATH\n")
        return 64
    deadline = time.monotonic() + patience_seconds
    # The listener's name exists only while there is readiness to tell, so there is nothing to wait at but time.
    while True:
        ready = _is_ready(path, deadline)
        if ready or ready is None:
            return 0 if ready else 1
        if time.monotonic() + _PAUSE_SECONDS >= deadline:
            return 1
        time.sleep(_PAUSE_SECONDS)


def _is_ready(path: str, deadline: float) -> bool | None:
    """Ask once; None where this path can never be a listener's."""
    if "\0" in path:
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(max(deadline - time.monotonic(), _PAUSE_SECONDS))
        try:
            connection.connect(path)
            answer = b""
            while len(answer) < len(READY_ANSWER):
                part = connection.recv(len(READY_ANSWER) - len(answer))
                if not part:
                    break
                answer += part
        except (FileNotFoundError, ConnectionError, TimeoutError):
            return False
        except OSError:
            return None
    return answer == READY_ANSWER
