"""From an HTTP exchange with the engine to an answer or exactly one typed error."""

from __future__ import annotations

import contextlib
import http.client
from typing import TYPE_CHECKING, Any, TypeVar

import requests
import urllib3

from driver_docker.engine import (
    EngineAbsentError,
    EngineConflictError,
    EngineError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
)
from driver_docker.errors import public_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Result = TypeVar("Result")

_HTTP_NOT_FOUND = 404
_HTTP_CONFLICT = 409
_HTTP_FIRST_ERROR = 400
_TIMEOUTS = (requests.exceptions.Timeout, urllib3.exceptions.TimeoutError, TimeoutError)
_BROKEN = (requests.exceptions.RequestException, urllib3.exceptions.HTTPError, OSError)


def checked(send: Callable[[], requests.Response], what: str) -> requests.Response:
    """Send one request.

    Args:
        send: Makes the request and returns its answer.
        what: The object it is about, for the error's text.

    Returns:
        The answer, whose status is below 400.

    Raises:
        EngineError: The narrowest type that fits.
    """
    try:
        answer = send()
    except _TIMEOUTS as error:
        raise EngineTimeoutError(f"the engine did not answer in time{_about(what)}") from error
    except _BROKEN as error:
        raise EngineUnreachableError(f"the engine cannot be reached{_about(what)}: {_cause(error)}") from error
    if answer.status_code < _HTTP_FIRST_ERROR:
        return answer
    with answer:
        try:
            words = _words(answer, what)
        except _BROKEN as error:
            raise EngineUnreachableError(f"the engine's answer about {what} broke off") from error
    kind: type[EngineError] = EngineRefusedError
    if answer.status_code == _HTTP_NOT_FOUND:
        kind = EngineAbsentError
    elif answer.status_code == _HTTP_CONFLICT:
        kind = EngineConflictError
    raise kind(words)


def decoded(answer: requests.Response, what: str) -> Any:
    """The JSON of an answer.

    Raises:
        EngineError: The body is no JSON.
    """
    try:
        return answer.json()
    except ValueError as error:
        raise EngineError(f"the engine's answer about {what} is no JSON") from error


def shaped(convert: Callable[[Any], Result], body: Any, what: str) -> Result:
    """Turn the JSON of an answer into facts.

    Args:
        convert: Reads what it needs of the body.
        body: JSON of any shape: an engine's, or of whatever stands in front of one.
        what: The object it is about, for the error's text.

    Raises:
        EngineError: The body has another shape than an engine's answer. Its content is not quoted.
    """
    try:
        return convert(body)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise EngineError(f"the engine's answer about {what} cannot be understood ({type(error).__name__})") from error


def guarded(chunks: Callable[[], Iterable[bytes]], what: str) -> Iterator[bytes]:
    """Iterate over a streamed body.

    Raises:
        EngineTimeoutError: The stream fell silent.
        EngineUnreachableError: The stream broke off.
    """
    try:
        yield from chunks()
    except _TIMEOUTS as error:
        raise EngineTimeoutError(f"the engine fell silent in the middle of {what}") from error
    except _BROKEN as error:
        raise EngineUnreachableError(f"the engine's answer about {what} broke off: {_cause(error)}") from error


def shut_down(answer: requests.Response) -> None:
    """End an answer that another thread reads. Nothing where its connection has ended already."""
    with contextlib.suppress(OSError, ValueError, RuntimeError, urllib3.exceptions.HTTPError):
        answer.raw.shutdown()


def _about(what: str) -> str:
    """The object of a request, unless it is the engine itself."""
    return "" if what == "the engine" else f" about {what}"


def _words(answer: requests.Response, what: str) -> str:
    try:
        message = answer.json().get("message", "")
    except (ValueError, AttributeError):
        message = answer.text
    return public_text(str(message) or f"the engine answered {answer.status_code}{_about(what)}", limit_bytes=4096)


def _cause(error: BaseException) -> str:
    """The innermost operating system error, which is what a reader can act on, else the innermost error's words."""
    seen: BaseException | None = error
    told = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.strerror:
            return seen.strerror
        inner = [argument for argument in seen.args if isinstance(argument, BaseException)]
        reason = getattr(seen, "reason", None)
        wrapped = inner[-1] if inner else reason if isinstance(reason, BaseException) else None
        told = wrapped or told
        seen = wrapped or seen.__context__
    if isinstance(told, http.client.HTTPException) and not isinstance(told, OSError):
        return "its answer is no whole HTTP answer"  # the exception's own text is a piece of what came
    return public_text(str(told), limit_bytes=256)
