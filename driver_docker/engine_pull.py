"""One image pull over the engine's API: its lines, its failures, and its end when nobody wants it any more."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import TYPE_CHECKING

import urllib3

from driver_docker.engine import EngineError, EngineRefusedError, EngineUnreachableError
from driver_docker.engine_http import guarded
from driver_docker.engine_objects import PullProgress
from driver_docker.errors import public_text

if TYPE_CHECKING:
    from collections.abc import Callable

    import requests

_MAX_WORDS_BYTES = 4096


def pull_line(line: bytes) -> PullProgress:
    """Decode one line of a pull's stream.

    Raises:
        EngineRefusedError: The line tells a failure: the stream's status was 200 long before (compute-driver contract
            5.12).
        EngineError: It is no line of a pull.
    """
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise EngineError("the engine's progress broke off in the middle of a line") from error
    if not isinstance(entry, dict):
        raise EngineError("the engine's progress is not a stream of objects")
    if "errorDetail" in entry or "error" in entry:
        detail = entry.get("errorDetail")
        words = detail.get("message") if isinstance(detail, dict) else None
        cause = words or entry.get("error") or "the engine named no cause"
        raise EngineRefusedError(public_text(str(cause), limit_bytes=_MAX_WORDS_BYTES))
    amount = entry.get("progressDetail")
    sizes = amount if isinstance(amount, dict) else {}
    return PullProgress(
        status=str(entry.get("status") or ""),
        layer_id=str(entry.get("id") or ""),
        current_bytes=_size(sizes.get("current")),
        total_bytes=_size(sizes.get("total")),
    )


class ImagePull:
    """A pull that runs on a thread and can be given up from another.

    Args:
        send: Sends the request and returns the answer once its head is there.
        what: The image, for error texts.
        on_line: Called on the thread for each line.
    """

    def __init__(
        self, send: Callable[[], requests.Response], *, what: str, on_line: Callable[[PullProgress], None]
    ) -> None:
        self._send = send
        self._what = what
        self._on_line = on_line
        self._lock = threading.Lock()
        self._answer: requests.Response | None = None
        self._given_up = False

    def run(self) -> None:
        """Read the stream to its end.

        Raises:
            EngineError: The pull failed, or its stream was cut.
        """
        answer = self._send()
        with answer:
            with self._lock:
                if self._given_up:
                    raise EngineUnreachableError(f"the pull of {self._what} was given up")
                self._answer = answer
            try:
                for line in guarded(answer.iter_lines, self._what):
                    if line.strip():
                        self._on_line(pull_line(line))
            finally:
                with self._lock:
                    self._answer = None

    def give_up(self) -> None:
        """Break the connection, upon which the engine ends the pull. Idempotent.

        Before the head of the answer is there the connection cannot be broken; then it is broken as soon as it comes.
        """
        with self._lock:
            self._given_up = True
            if self._answer is not None:
                with contextlib.suppress(OSError, ValueError, RuntimeError, urllib3.exceptions.HTTPError):
                    self._answer.raw.shutdown()


def _size(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
