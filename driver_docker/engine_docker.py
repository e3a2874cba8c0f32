"""Docker Engine behind the `Engine` protocol: docker-py's transport, our own requests and decoding.

docker-py's `APIClient` is a `requests.Session` that knows unix, TCP and TLS transports. Only that is used of it;
paths, bodies and answers are handled here, so that each failure becomes exactly one typed error.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Self

from driver_docker.engine import EngineAbsentError, EventStream
from driver_docker.engine_connection import EngineConnection, open_session
from driver_docker.engine_events import DockerEventStream
from driver_docker.engine_host import HostFacts, host_facts
from driver_docker.engine_http import shaped
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
from driver_docker.engine_wire import (
    container_body,
    container_facts,
    container_row,
    image_facts,
    label_filter,
    link_target,
    refreshed_info,
    volume_facts,
)
from driver_docker.log_frames import LineSearch
from driver_docker.shared_questions import SharedQuestions
from driver_docker.workers import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping

    import docker
    import requests

    from driver_docker.engine_objects import PullProgress
    from driver_docker.engine_tls import EngineTls
    from driver_docker.image_reference import ImageReference
    from driver_docker.registry_credentials import RegistryCredentials

_STOP_MARGIN_SECONDS = 15.0
_PULL_SILENCE_SECONDS = 600.0
"""Long: layers wait in the engine's queue, silently, while those of other pulls are on their way."""
_LOG_READ_LIMIT_BYTES = 4 * 1024 * 1024


class DockerEngine:
    """A connection to one Docker Engine."""

    def __init__(self, client: docker.APIClient, info: EngineInfo) -> None:
        self._info = info
        self._engine = EngineConnection(client, info.api_version)
        self._questions = SharedQuestions()
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
            return cls(*await pool.run(lambda: open_session(base_url, tls)))
        finally:
            pool.close()

    @property
    def info(self) -> EngineInfo:
        """What was learnt when the connection was opened."""
        return self._info

    async def ping(self) -> None:
        """Return when the engine answers."""

        async def ping() -> None:
            await self._engine.ask("GET", "/_ping", what="the engine", timeout_seconds=5.0)

        await self._questions.ask("the engine", ping)

    async def describe(self) -> HostFacts:
        """What the engine says of the machine it runs on, asked now."""
        version = await self._engine.json("GET", "/version", what="the engine")
        info = await self._engine.json("GET", "/info", what="the engine")
        return shaped(lambda found: host_facts(found, version), info, "the engine")

    async def refresh_info(self) -> EngineInfo:
        """Ask again for what may change while the engine runs."""
        what = "info of the engine"
        found = await self._engine.json("GET", "/info", what=what)
        self._info = shaped(lambda info: refreshed_info(self._info, info), found, what)
        return self._info

    async def inspect_image(self, reference: str) -> ImageFacts:
        """Facts of an image by ID, digest or tag."""
        what = f"image {reference}"

        async def inspect() -> ImageFacts:
            return shaped(image_facts, await self._engine.json("GET", f"/images/{reference}/json", what=what), what)

        return await self._questions.ask(what, inspect)

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
            return self._engine.send(
                "POST",
                "/images/create",
                what=what,
                params=params,
                headers=headers,
                stream=True,
                timeout=_PULL_SILENCE_SECONDS,
            )

        def tell(progress: PullProgress) -> None:
            loop.call_soon_threadsafe(on_progress, progress)

        pull = ImagePull(send, what=what, on_line=tell)
        try:
            await self._engine.run(pull.run, pool=self._engine.pulls)
        except asyncio.CancelledError:
            pull.give_up()
            raise

    async def create_container(self, spec: ContainerSpec) -> str:
        """Create without starting; returns the container's id."""
        what = f"container {spec.name}"
        answer = await self._engine.json(
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
        return shaped(container_facts, await self._engine.json("GET", f"/containers/{container}/json", what=what), what)

    async def list_containers(self, labels: Mapping[str, str]) -> tuple[ContainerRow, ...]:
        """All containers, running or not, that carry every one of these labels."""
        params = {"all": "1", "filters": json.dumps({"label": label_filter(labels)})}
        what = "the list of containers"
        rows = await self._engine.json("GET", "/containers/json", params=params, what=what)
        return shaped(lambda found: tuple(container_row(row) for row in _items(found)), rows, what)

    async def start_container(self, container: str) -> None:
        """Start; a container that already runs is no error."""
        await self._engine.ask(
            "POST",
            f"/containers/{container}/start",
            what=f"container {container[:12]}",
            to_the_end=True,
            timeout_seconds=120.0,
        )

    async def stop_container(self, container: str, *, grace_seconds: int) -> None:
        """Terminate, then kill after the grace; one that has already ended is no error."""
        await self._engine.ask(
            "POST",
            f"/containers/{container}/stop",
            params={"t": str(grace_seconds)},
            what=f"container {container[:12]}",
            pool=self._engine.long,
            to_the_end=True,
            timeout_seconds=grace_seconds + _STOP_MARGIN_SECONDS,
        )

    async def kill_container(self, container: str, signal: str = "SIGKILL") -> None:
        """Send one signal."""
        await self._engine.ask(
            "POST", f"/containers/{container}/kill", params={"signal": signal}, what=f"container {container[:12]}"
        )

    async def unpause_container(self, container: str) -> None:
        """Resume a paused container."""
        await self._engine.ask("POST", f"/containers/{container}/unpause", what=f"container {container[:12]}")

    async def remove_container(self, container: str, *, force: bool = True) -> None:
        """Remove with its anonymous volumes; `force` kills it first."""
        await self._engine.ask(
            "DELETE",
            f"/containers/{container}",
            params={"force": "1" if force else "0", "v": "1"},
            what=f"container {container[:64]}",
            pool=self._engine.long,
            to_the_end=True,
            timeout_seconds=60.0,
        )

    async def put_archive(self, container: str, path: str, tar: bytes) -> None:
        """Unpack an uncompressed tar below `path`, with the owners and modes of its headers."""
        await self._engine.ask(
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
            await self._engine.ask(
                "HEAD", f"/containers/{container}/archive", params={"path": path}, what=f"{path} of {container[:12]}"
            )
        except EngineAbsentError:
            return False
        return True

    async def link_target(self, container: str, path: str) -> str | None:
        """Where a symbolic link leads inside a container, fully followed; `None` when the path is no link."""
        what = f"{path} of container {container[:12]}"
        answer = await self._engine.ask("HEAD", f"/containers/{container}/archive", params={"path": path}, what=what)
        return link_target(answer.headers.get("X-Docker-Container-Path-Stat", ""), what)

    async def get_archive(self, container: str, path: str, *, max_bytes: int) -> bytes:
        """The tar of `path`."""
        return await self._engine.read(
            f"/containers/{container}/archive",
            what=f"{path} of container {container[:12]}",
            params={"path": path},
            max_bytes=max_bytes,
        )

    async def log_tail(self, container: str, *, max_lines: int) -> bytes:
        """The last lines of both streams as the engine frames them; at most 4 MiB."""
        return await self._engine.read(
            f"/containers/{container}/logs",
            what=f"log of container {container[:12]}",
            params={"stdout": "1", "stderr": "1", "tail": str(max_lines)},
            max_bytes=_LOG_READ_LIMIT_BYTES,
            cut=True,
        )

    async def exec_command(self, container: str, argv: tuple[str, ...], *, timeout_seconds: float) -> ExecResult:
        """Run a command in a running container and wait for it."""
        what = f"command in container {container[:12]}"
        body = {"AttachStdout": True, "AttachStderr": True, "Cmd": list(argv)}
        made = shaped(_id, await self._engine.json("POST", f"/containers/{container}/exec", body=body, what=what), what)
        await self._engine.ask(
            "POST",
            f"/exec/{made}/start",
            body={"Detach": False, "Tty": False},
            what=what,
            pool=self._engine.commands,
            timeout_seconds=timeout_seconds,
        )
        outcome = await self._engine.json("GET", f"/exec/{made}/json", what=what)
        code = shaped(lambda found: found.get("ExitCode"), outcome, what)
        return ExecResult(exit_code=code if isinstance(code, int) else None)

    async def wait_for_line(self, container: str, line: str, *, timeout_seconds: float) -> bool:
        """Follow the standard error of a container until it has written a line; whether it has."""
        search = LineSearch(line)
        return await self._engine.follow(
            f"/containers/{container}/logs",
            what=f"log of container {container[:12]}",
            params={"stderr": "1", "follow": "1"},
            until=search.feed,
            timeout_seconds=timeout_seconds,
        )

    async def create_volume(self, spec: VolumeSpec) -> VolumeFacts:
        """Create a local volume, or return the one that has this name."""
        body = {"Name": spec.name, "Driver": "local", "Labels": dict(spec.labels)}
        what = f"volume {spec.name}"
        made = await self._engine.json("POST", "/volumes/create", body=body, what=what, to_the_end=True)
        return shaped(volume_facts, made, what)

    async def inspect_volume(self, name: str) -> VolumeFacts:
        """Facts of a volume."""
        what = f"volume {name}"

        async def inspect() -> VolumeFacts:
            return shaped(volume_facts, await self._engine.json("GET", f"/volumes/{name}", what=what), what)

        return await self._questions.ask(what, inspect)

    async def list_volumes(self, labels: Mapping[str, str]) -> tuple[VolumeFacts, ...]:
        """All volumes that carry every one of these labels."""
        params = {"filters": json.dumps({"label": label_filter(labels)})}
        what = "the list of volumes"
        found = await self._engine.json("GET", "/volumes", params=params, what=what)
        return shaped(lambda body: tuple(volume_facts(each) for each in _items(body["Volumes"] or [])), found, what)

    async def remove_volume(self, name: str) -> None:
        """Remove a volume."""
        await self._engine.ask("DELETE", f"/volumes/{name}", what=f"volume {name}", to_the_end=True)

    async def subscribe(self, *, kind: str, actions: Collection[str], labels: Mapping[str, str]) -> EventStream:
        """Open the event stream; returns once the engine has accepted the subscription."""
        params = {"filters": json.dumps({"type": [kind], "event": sorted(actions), "label": label_filter(labels)})}
        answer = await self._engine.open("/events", what="the engine's events", params=params)
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
        self._engine.close()
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


def _id(body: Any) -> str:
    return str(body["Id"])


def _items(body: Any) -> list[Any]:
    """A list: anything else, which may be empty too, must not be taken for the news that there is nothing."""
    if not isinstance(body, list):
        raise TypeError(type(body).__name__)
    return body
