"""The connection under `DockerEngine`: an HTTP session, the threads that wait for it, and how it is opened.

Each kind of waiting has threads of its own, so that none is kept waiting by another: short questions, calls that last
as long as a container takes to end, commands in containers, pulls, and logs that are followed.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import TYPE_CHECKING, Any, Final, TypeVar

import docker.errors

from driver_docker.engine import (
    EngineError,
    EngineIncompatibleError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
)
from driver_docker.engine_http import checked, decoded, guarded, shaped, shut_down
from driver_docker.engine_session import EngineSession
from driver_docker.engine_wire import engine_info
from driver_docker.errors import public_text
from driver_docker.workers import NoWorkerError, WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import docker
    import requests

    from driver_docker.engine_objects import EngineInfo
    from driver_docker.engine_tls import EngineTls

Result = TypeVar("Result")

REQUEST_TIMEOUT_SECONDS: Final = 30.0
MAX_COMMANDS: Final = 32
"""Commands in containers that are waited for at a time; a launch that asks its supervisor runs one."""
_KNOCK_SECONDS: Final = 10.0
_MAX_CONNECTIONS: Final = 32
_CHUNK_BYTES: Final = 64 * 1024


class EngineConnection:
    """Requests to one engine in the API version that was agreed on. Every failure is one typed error."""

    def __init__(self, client: docker.APIClient, api_version: str) -> None:
        self._client = client
        self._base = f"{client.base_url}/v{api_version}"
        self._closed = False
        self._short = WorkerPool("engine", max_threads=16)
        self.long = WorkerPool("engine-wait", max_threads=8)
        """For what takes as long as a container takes to end."""
        self.commands = WorkerPool("engine-exec", max_threads=MAX_COMMANDS)
        """For commands in containers: a probe may wait ten seconds by itself, and no stop may wait for that."""
        self.pulls = WorkerPool("engine-pull", max_threads=32)
        self._followed = WorkerPool("engine-follow", max_threads=32)

    async def json(
        self,
        method: str,
        path: str,
        *,
        what: str,
        params: Mapping[str, str] | None = None,
        body: object = None,
        to_the_end: bool = False,
    ) -> Any:
        """The JSON that answers a request.

        Raises:
            EngineError: The narrowest type that fits.
        """
        answer = await self.ask(method, path, what=what, params=params, body=body, to_the_end=to_the_end)
        return decoded(answer, what)

    async def ask(
        self,
        method: str,
        path: str,
        *,
        what: str,
        params: Mapping[str, str] | None = None,
        body: object = None,
        data: bytes | None = None,
        pool: WorkerPool | None = None,
        to_the_end: bool = False,
        timeout_seconds: float = REQUEST_TIMEOUT_SECONDS,
    ) -> requests.Response:
        """The whole answer to a request.

        Raises:
            EngineError: The narrowest type that fits.
        """

        def send() -> requests.Response:
            return self.send(method, path, what=what, params=params, json=body, data=data, timeout=timeout_seconds)

        return await self.run(send, pool=pool, to_the_end=to_the_end)

    async def open(self, path: str, *, what: str, params: Mapping[str, str]) -> requests.Response:
        """An answer whose body goes on for ever.

        Raises:
            EngineError: The narrowest type that fits.
        """
        endless = (REQUEST_TIMEOUT_SECONDS, None)
        return await self.run(lambda: self.send("GET", path, what=what, params=params, stream=True, timeout=endless))

    async def read(
        self, path: str, *, what: str, params: Mapping[str, str], max_bytes: int, cut: bool = False
    ) -> bytes:
        """A body of any content, as long as it is not too long.

        Args:
            path: Below the API's version.
            what: The object it is about, for error texts.
            params: The query.
            max_bytes: How much is read at most.
            cut: Whether what is longer is cut rather than refused.

        Raises:
            EngineRefusedError: It is longer.
            EngineError: The narrowest type that fits.
        """

        def fetch() -> bytes:
            answer = self.send("GET", path, what=what, params=params, stream=True, timeout=REQUEST_TIMEOUT_SECONDS)
            found = bytearray()
            with answer:
                for chunk in guarded(lambda: answer.iter_content(_CHUNK_BYTES), what):
                    found += chunk
                    if len(found) > max_bytes:
                        break
            if len(found) > max_bytes and not cut:
                raise EngineRefusedError(f"{what} is larger than {max_bytes} bytes")
            return bytes(found[:max_bytes])

        return await self.run(fetch)

    async def follow(
        self,
        path: str,
        *,
        what: str,
        params: Mapping[str, str],
        until: Callable[[bytes], bool],
        timeout_seconds: float,
    ) -> bool:
        """Hand a body over in the pieces that arrive.

        Args:
            path: Below the API's version.
            what: The object it is about, for error texts.
            params: The query.
            until: Takes each piece, on a thread; true ends it.
            timeout_seconds: How long to go on.

        Returns:
            Whether `until` was ever true; false where body or time ended before.

        Raises:
            EngineError: The narrowest type that fits.
        """
        answers: list[requests.Response] = []
        over = threading.Event()

        def read() -> bool:
            if over.is_set():
                return False
            # A connection of its own, which can be shut down while it is read.
            headers = {"Connection": "close"}
            answer = self.send(
                "GET", path, what=what, params=params, headers=headers, stream=True, timeout=timeout_seconds
            )
            answers.append(answer)
            with answer:
                pieces = guarded(lambda: iter(lambda: answer.raw.read1(_CHUNK_BYTES), b""), what)
                return not over.is_set() and any(until(piece) for piece in pieces)

        try:
            async with asyncio.timeout(timeout_seconds):
                return await self.run(read, pool=self._followed)
        except (TimeoutError, EngineTimeoutError):
            return False
        finally:
            over.set()
            for answer in answers:
                shut_down(answer)

    def send(self, method: str, path: str, *, what: str, **request: Any) -> requests.Response:
        """Send a request and wait for its answer. Blocks: to be called on one of the threads.

        Raises:
            EngineError: The narrowest type that fits.
        """
        return checked(lambda: self._client.request(method, f"{self._base}{path}", **request), what)

    async def run(
        self, call: Callable[[], Result], *, pool: WorkerPool | None = None, to_the_end: bool = False
    ) -> Result:
        """Run a blocking call on a thread.

        Raises:
            EngineUnreachableError: The connection is closed, or there is no thread to be had.
        """
        if self._closed:
            raise EngineUnreachableError("the connection to the engine is closed")
        try:
            return await (pool or self._short).run(call, to_the_end=to_the_end)
        except NoWorkerError as error:
            raise EngineUnreachableError(f"the engine could not be asked: {error}") from error

    def close(self) -> None:
        """End every thread, and tell who waits for one. Idempotent."""
        self._closed = True
        closed = EngineUnreachableError("the connection to the engine was closed")
        for pool in (self._short, self.long, self.commands, self.pulls, self._followed):
            pool.close(abandoned=closed)
        self._client.close()


def open_session(base_url: str, tls: EngineTls | None) -> tuple[EngineSession, EngineInfo]:
    """Reach an engine and agree on an API version. Blocks.

    Raises:
        EngineUnreachableError: Nobody answers there.
        EngineIncompatibleError: What answers is not a Docker Engine, or no API version fits both sides.
    """
    if base_url.startswith("unix://"):
        _knock(base_url)
    try:
        client = EngineSession(
            base_url, tls=tls, timeout_seconds=REQUEST_TIMEOUT_SECONDS, max_connections=_MAX_CONNECTIONS
        )
    except docker.errors.DockerException as error:
        raise EngineUnreachableError(f"no Docker Engine answers at {base_url}: {public_text(str(error))}") from error
    try:
        return client, _introduced(client, base_url)
    except BaseException:
        client.close()
        raise


def _introduced(client: docker.APIClient, where: str) -> EngineInfo:
    """Ask who answers, and agree on an API version."""
    try:
        answer = checked(lambda: client.request("GET", f"{client.base_url}/version", timeout=10.0), "the engine")
        details = checked(lambda: client.request("GET", f"{client.base_url}/info", timeout=10.0), "the engine")
        version, info = decoded(answer, "its version"), decoded(details, "its info")
    except EngineError as error:
        raise type(error)(f"no Docker Engine answers at {where}: {error.message}") from error
    if "Libpod-Api-Version" in answer.headers:
        raise EngineIncompatibleError(f"{where} is Podman's API, not a Docker Engine")
    return shaped(lambda found: engine_info(found, info, where), version, "its version and info")


def _knock(base_url: str) -> None:
    """Connect once by ourselves: docker-py leaves the socket of a connection that fails to the garbage collector."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_KNOCK_SECONDS)
        try:
            probe.connect(base_url.removeprefix("unix://"))
        except OSError as error:
            words = error.strerror or public_text(str(error))
            raise EngineUnreachableError(f"no Docker Engine answers at {base_url}: {words}") from None
