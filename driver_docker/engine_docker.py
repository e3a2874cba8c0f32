"""Docker Engine behind the `Engine` protocol: docker-py's transport, our own requests and decoding.

docker-py's `APIClient` is a `requests.Session` that knows unix, TCP and TLS transports. Only that is used of it;
paths, bodies and answers are handled here, so that each failure becomes exactly one typed error.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING, Any, Self, TypeVar

import docker
import docker.tls

from driver_docker.engine import (
    EngineAbsentError,
    EngineError,
    EngineIncompatibleError,
    EngineRefusedError,
    EngineUnreachableError,
    EventStream,
)
from driver_docker.engine_events import DockerEventStream
from driver_docker.engine_host import HostFacts, host_facts
from driver_docker.engine_http import checked, decoded, guarded, shaped
from driver_docker.engine_objects import (
    ContainerFacts,
    ContainerRow,
    ContainerSpec,
    EngineInfo,
    ExecResult,
    ImageFacts,
    VolumeFacts,
    VolumeSpec,
)
from driver_docker.engine_pull import ImagePull
from driver_docker.engine_session import EngineSession
from driver_docker.engine_wire import (
    container_body,
    container_facts,
    container_row,
    engine_info,
    image_facts,
    label_filter,
    link_target,
    refreshed_info,
    strip_frames,
    volume_facts,
)
from driver_docker.errors import public_text
from driver_docker.workers import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from datetime import datetime

    import requests

    from driver_docker.engine_objects import PullProgress
    from driver_docker.engine_tls import EngineTls
    from driver_docker.image_reference import ImageReference
    from driver_docker.registry_credentials import RegistryCredentials

Result = TypeVar("Result")

_REQUEST_TIMEOUT_SECONDS = 30.0
_KNOCK_SECONDS = 10.0
_STOP_MARGIN_SECONDS = 15.0
_PULL_SILENCE_SECONDS = 600.0
"""Long: layers wait in the engine's queue, silently, while those of other pulls are on their way."""
_MAX_CONNECTIONS = 32
_MAX_COMMANDS = 32
"""Commands in containers that are waited for at a time; a launch that waits for its supervisor runs one."""
_LOG_READ_LIMIT_BYTES = 4 * 1024 * 1024
_CHUNK_BYTES = 64 * 1024


class DockerEngine:
    """A connection to one Docker Engine."""

    def __init__(self, client: docker.APIClient, info: EngineInfo) -> None:
        self._client = client
        self._info = info
        self._base = f"{client.base_url}/v{info.api_version}"
        self._short = WorkerPool("engine", max_threads=16)
        self._long = WorkerPool("engine-wait", max_threads=8)
        # Apart from the others: a probe may wait ten seconds by itself, and no stop or removal may wait for that.
        self._commands = WorkerPool("engine-exec", max_threads=_MAX_COMMANDS)
        self._pulls = WorkerPool("engine-pull", max_threads=32)
        self._streams: set[DockerEventStream] = set()
        self._closed = False
        self._close_with: list[Callable[[], Awaitable[None]]] = []

    @classmethod
    async def connect(cls, base_url: str, *, tls: EngineTls | None = None) -> Self:
        """Reach an engine and agree on an API version.

        Args:
            base_url: For example `unix:///var/run/docker.sock`.
            tls: The files of a TLS connection to a `tcp://` address.

        Raises:
            EngineUnreachableError: Nobody answers there.
            EngineIncompatibleError: What answers is not a Docker Engine, or no API version fits both sides.
        """
        pool = WorkerPool("engine-connect", max_threads=1)
        try:
            return await pool.run(lambda: cls._open(base_url, tls))
        finally:
            pool.close()

    @classmethod
    def _open(cls, base_url: str, tls: EngineTls | None = None) -> Self:
        if base_url.startswith("unix://"):
            _knock(base_url)
        try:
            client = EngineSession(
                base_url, tls=tls, timeout_seconds=_REQUEST_TIMEOUT_SECONDS, max_connections=_MAX_CONNECTIONS
            )
        except docker.errors.DockerException as error:
            raise EngineUnreachableError(
                f"no Docker Engine answers at {base_url}: {public_text(str(error))}"
            ) from error
        try:
            return cls(client, _introduced(client, base_url))
        except BaseException:
            client.close()
            raise

    @property
    def info(self) -> EngineInfo:
        """What was learnt when the connection was opened."""
        return self._info

    async def ping(self) -> None:
        """Return when the engine answers."""
        await self._ask("GET", "/_ping", what="the engine", timeout_seconds=5.0)

    async def describe(self) -> HostFacts:
        """What the engine says of the machine it runs on, asked now."""
        version = await self._json("GET", "/version", what="the engine")
        info = await self._json("GET", "/info", what="the engine")
        return shaped(lambda found: host_facts(found, version), info, "the engine")

    async def refresh_info(self) -> EngineInfo:
        """Ask again for what may change while the engine runs."""
        what = "info of the engine"
        found = await self._json("GET", "/info", what=what)
        self._info = shaped(lambda info: refreshed_info(self._info, info), found, what)
        return self._info

    async def inspect_image(self, reference: str) -> ImageFacts:
        """Facts of an image by ID, digest or tag."""
        what = f"image {reference}"
        return shaped(image_facts, await self._json("GET", f"/images/{reference}/json", what=what), what)

    async def pull_image(
        self,
        reference: ImageReference,
        on_progress: Callable[[PullProgress], None],
        *,
        credentials: RegistryCredentials | None = None,
    ) -> None:
        """Pull one tag or digest; an error line inside the stream is a refusal."""
        params = {"fromImage": reference.name, "tag": reference.pulled_tag}
        headers = {"X-Registry-Auth": credentials.header()} if credentials is not None else {}
        loop = asyncio.get_running_loop()
        what = f"image {reference}"

        def send() -> requests.Response:
            return checked(
                lambda: self._client.request(
                    "POST",
                    f"{self._base}/images/create",
                    params=params,
                    headers=headers,
                    stream=True,
                    timeout=_PULL_SILENCE_SECONDS,
                ),
                what,
            )

        def tell(progress: PullProgress) -> None:
            loop.call_soon_threadsafe(on_progress, progress)

        pull = ImagePull(send, what=what, on_line=tell)
        try:
            await self._run(self._pulls, pull.run)
        except asyncio.CancelledError:
            pull.give_up()
            raise

    async def create_container(self, spec: ContainerSpec) -> str:
        """Create without starting; returns the container's id."""
        what = f"container {spec.name}"
        answer = await self._json(
            "POST",
            "/containers/create",
            params={"name": spec.name},
            body=container_body(spec),
            what=what,
            to_the_end=True,
        )
        return shaped(_id, answer, what)

    async def inspect_container(self, container: str) -> ContainerFacts:
        """Facts of a container by id or name."""
        what = f"container {container[:64]}"
        return shaped(container_facts, await self._json("GET", f"/containers/{container}/json", what=what), what)

    async def list_containers(self, labels: Mapping[str, str]) -> tuple[ContainerRow, ...]:
        """All containers, running or not, that carry every one of these labels."""
        params = {"all": "1", "filters": json.dumps({"label": label_filter(labels)})}
        what = "the list of containers"
        rows = await self._json("GET", "/containers/json", params=params, what=what)
        return shaped(lambda found: tuple(container_row(row) for row in _items(found)), rows, what)

    async def start_container(self, container: str) -> None:
        """Start; a container that already runs is no error."""
        await self._ask(
            "POST",
            f"/containers/{container}/start",
            what=f"container {container[:12]}",
            to_the_end=True,
            timeout_seconds=120.0,
        )

    async def stop_container(self, container: str, *, grace_seconds: int) -> None:
        """Terminate, then kill after the grace; one that has already ended is no error."""
        await self._ask(
            "POST",
            f"/containers/{container}/stop",
            params={"t": str(grace_seconds)},
            what=f"container {container[:12]}",
            pool=self._long,
            to_the_end=True,
            timeout_seconds=grace_seconds + _STOP_MARGIN_SECONDS,
        )

    async def kill_container(self, container: str, signal: str = "SIGKILL") -> None:
        """Send one signal."""
        await self._ask(
            "POST", f"/containers/{container}/kill", params={"signal": signal}, what=f"container {container[:12]}"
        )

    async def unpause_container(self, container: str) -> None:
        """Resume a paused container."""
        await self._ask("POST", f"/containers/{container}/unpause", what=f"container {container[:12]}")

    async def remove_container(self, container: str, *, force: bool = True) -> None:
        """Remove with its anonymous volumes; `force` kills it first."""
        await self._ask(
            "DELETE",
            f"/containers/{container}",
            params={"force": "1" if force else "0", "v": "1"},
            what=f"container {container[:64]}",
            pool=self._long,
            to_the_end=True,
            timeout_seconds=60.0,
        )

    async def put_archive(self, container: str, path: str, tar: bytes) -> None:
        """Unpack an uncompressed tar below `path`, with the owners and modes of its headers."""
        await self._ask(
            "PUT",
            f"/containers/{container}/archive",
            params={"path": path, "noOverwriteDirNonDir": "true"},
            data=tar,
            what=f"archive into container {container[:12]}",
            to_the_end=True,
        )

    async def has_path(self, container: str, path: str) -> bool:
        """Whether a path exists in a container, running or not."""
        try:
            await self._ask(
                "HEAD", f"/containers/{container}/archive", params={"path": path}, what=f"{path} of {container[:12]}"
            )
        except EngineAbsentError:
            return False
        return True

    async def link_target(self, container: str, path: str) -> str | None:
        """Where a symbolic link leads inside a container, fully followed; `None` when the path is no link."""
        what = f"{path} of container {container[:12]}"
        answer = await self._ask("HEAD", f"/containers/{container}/archive", params={"path": path}, what=what)
        return link_target(answer.headers.get("X-Docker-Container-Path-Stat", ""), what)

    async def get_archive(self, container: str, path: str, *, max_bytes: int) -> bytes:
        """The tar of `path`."""
        what = f"{path} of container {container[:12]}"

        def fetch() -> bytes:
            answer = checked(
                lambda: self._client.request(
                    "GET",
                    f"{self._base}/containers/{container}/archive",
                    params={"path": path},
                    stream=True,
                    timeout=_REQUEST_TIMEOUT_SECONDS,
                ),
                what,
            )
            with answer:
                found = bytearray()
                for chunk in guarded(lambda: answer.iter_content(_CHUNK_BYTES), what):
                    found += chunk
                    if len(found) > max_bytes:
                        raise EngineRefusedError(f"{what} is larger than {max_bytes} bytes")
                return bytes(found)

        return await self._run(self._short, fetch)

    async def log_tail(self, container: str, *, max_lines: int) -> bytes:
        """The last lines of both streams as the engine frames them; at most 4 MiB."""
        what = f"log of container {container[:12]}"

        def fetch() -> bytes:
            answer = checked(
                lambda: self._client.request(
                    "GET",
                    f"{self._base}/containers/{container}/logs",
                    params={"stdout": "1", "stderr": "1", "tail": str(max_lines)},
                    stream=True,
                    timeout=_REQUEST_TIMEOUT_SECONDS,
                ),
                what,
            )
            with answer:
                found = bytearray()
                for chunk in guarded(lambda: answer.iter_content(_CHUNK_BYTES), what):
                    found += chunk
                    if len(found) > _LOG_READ_LIMIT_BYTES:
                        break
            return bytes(found[:_LOG_READ_LIMIT_BYTES])

        return await self._run(self._short, fetch)

    async def exec_command(self, container: str, argv: tuple[str, ...], *, timeout_seconds: float) -> ExecResult:
        """Run a command in a running container and wait for it."""
        what = f"command in container {container[:12]}"
        body = {"AttachStdout": True, "AttachStderr": True, "Cmd": list(argv)}
        made = shaped(_id, await self._json("POST", f"/containers/{container}/exec", body=body, what=what), what)
        answer = await self._ask(
            "POST",
            f"/exec/{made}/start",
            body={"Detach": False, "Tty": False},
            what=what,
            pool=self._commands,
            timeout_seconds=timeout_seconds,
        )
        outcome = await self._json("GET", f"/exec/{made}/json", what=what)
        code = shaped(lambda found: found.get("ExitCode"), outcome, what)
        return ExecResult(exit_code=code if isinstance(code, int) else None, output=strip_frames(answer.content))

    async def create_volume(self, spec: VolumeSpec) -> VolumeFacts:
        """Create a local volume, or return the one that has this name."""
        body = {"Name": spec.name, "Driver": "local", "Labels": dict(spec.labels)}
        what = f"volume {spec.name}"
        made = await self._json("POST", "/volumes/create", body=body, what=what, to_the_end=True)
        return shaped(volume_facts, made, what)

    async def inspect_volume(self, name: str) -> VolumeFacts:
        """Facts of a volume."""
        what = f"volume {name}"
        return shaped(volume_facts, await self._json("GET", f"/volumes/{name}", what=what), what)

    async def list_volumes(self, labels: Mapping[str, str]) -> tuple[VolumeFacts, ...]:
        """All volumes that carry every one of these labels."""
        params = {"filters": json.dumps({"label": label_filter(labels)})}
        what = "the list of volumes"
        found = await self._json("GET", "/volumes", params=params, what=what)
        return shaped(lambda body: tuple(volume_facts(each) for each in _items(body["Volumes"] or [])), found, what)

    async def remove_volume(self, name: str) -> None:
        """Remove a volume."""
        await self._ask("DELETE", f"/volumes/{name}", what=f"volume {name}", to_the_end=True)

    async def subscribe(
        self, *, kinds: tuple[str, ...], labels: Mapping[str, str], since: datetime | None = None
    ) -> EventStream:
        """Open the event stream; returns once the engine has accepted the subscription."""
        params = {"filters": json.dumps({"type": list(kinds), "label": label_filter(labels)})}
        if since is not None:
            params["since"] = f"{since.timestamp():.9f}"

        def open_stream() -> requests.Response:
            return checked(
                lambda: self._client.request(
                    "GET",
                    f"{self._base}/events",
                    params=params,
                    stream=True,
                    timeout=(_REQUEST_TIMEOUT_SECONDS, None),
                ),
                "the engine's events",
            )

        answer = await self._run(self._short, open_stream)
        stream = DockerEventStream(answer, on_close=self._streams.discard)
        self._streams.add(stream)
        return stream

    async def close(self) -> None:
        """End every connection and thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for stream in tuple(self._streams):
            await stream.close()
        closed = EngineUnreachableError("the connection to the engine was closed")
        for pool in (self._short, self._long, self._commands, self._pulls):
            pool.close(abandoned=closed)
        self._client.close()
        for close in self._close_with:
            await close()

    def close_with(self, close: Callable[[], Awaitable[None]]) -> None:
        """Close something of this connection's own after it, for example the tunnel it goes through."""
        self._close_with.append(close)

    async def __aenter__(self) -> Self:
        """Return the engine itself."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close."""
        await self.close()

    async def _json(
        self,
        method: str,
        path: str,
        *,
        what: str,
        params: Mapping[str, str] | None = None,
        body: object = None,
        to_the_end: bool = False,
    ) -> Any:
        answer = await self._ask(method, path, what=what, params=params, body=body, to_the_end=to_the_end)
        return decoded(answer, what)

    async def _ask(
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
        timeout_seconds: float = _REQUEST_TIMEOUT_SECONDS,
    ) -> requests.Response:
        def send() -> requests.Response:
            return checked(
                lambda: self._client.request(
                    method,
                    f"{self._base}{path}",
                    params=params,
                    json=body,
                    data=data,
                    timeout=timeout_seconds,
                ),
                what,
            )

        return await self._run(pool or self._short, send, to_the_end=to_the_end)

    async def _run(self, pool: WorkerPool, call: Callable[[], Result], *, to_the_end: bool = False) -> Result:
        if self._closed:
            raise EngineUnreachableError("the connection to the engine is closed")
        return await pool.run(call, to_the_end=to_the_end)


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


def _id(body: Any) -> str:
    return str(body["Id"])


def _items(body: Any) -> list[Any]:
    """A list: anything else, which may be empty too, must not be taken for the news that there is nothing."""
    if not isinstance(body, list):
        raise TypeError(type(body).__name__)
    return body


def _knock(base_url: str) -> None:
    """Connect once by ourselves: docker-py leaves the socket of a connection that fails to the garbage collector."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_KNOCK_SECONDS)
        try:
            probe.connect(base_url.removeprefix("unix://"))
        except OSError as error:
            words = error.strerror or public_text(str(error))
            raise EngineUnreachableError(f"no Docker Engine answers at {base_url}: {words}") from None
