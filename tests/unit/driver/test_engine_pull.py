"""The stream of a pull: a 200 promises nothing, a cut is a failure, and nobody's pull is ended."""

from __future__ import annotations

import asyncio
import base64
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_docker.engine import EngineError, EngineRefusedError, EngineUnreachableError
from driver_docker.engine_docker import DockerEngine
from driver_docker.engine_objects import PullProgress
from driver_docker.engine_pull import pull_line
from driver_docker.image_reference import parse_reference
from driver_docker.registry_credentials import RegistryCredentials

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    Answer = Callable[["PullServer", asyncio.StreamWriter], Awaitable[None]]

LAYER = "0123456789ab"


@pytest.mark.parametrize(
    ("line", "progress"),
    [
        ({"status": "Pulling from x", "id": "latest"}, PullProgress(status="Pulling from x", layer_id="latest")),
        (
            {"status": "Downloading", "progressDetail": {"current": 5, "total": 9}, "id": LAYER},
            PullProgress(status="Downloading", layer_id=LAYER, current_bytes=5, total_bytes=9),
        ),
        ({"status": "Done", "progressDetail": {}, "id": LAYER}, PullProgress(status="Done", layer_id=LAYER)),
        ({"status": "x", "progressDetail": None}, PullProgress(status="x")),
        ({"status": "x", "progressDetail": {"current": -1, "total": "9"}}, PullProgress(status="x")),
        ({"status": "x", "progressDetail": {"current": True}}, PullProgress(status="x")),
        ({}, PullProgress(status="")),
    ],
)
def test_a_line_becomes_progress(line: dict[str, object], progress: PullProgress) -> None:
    assert pull_line(json.dumps(line).encode()) == progress


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"errorDetail": {"message": "manifest unknown"}, "error": "other"}, "manifest unknown"),
        ({"error": "no space left"}, "no space left"),
        ({"errorDetail": {"code": 1, "message": ""}, "error": "why"}, "why"),
        ({"errorDetail": {}}, "the engine named no cause"),
        ({"errorDetail": None}, "the engine named no cause"),
        ({"error": ""}, "the engine named no cause"),
        ({"error": "two\nlines\x1b"}, "two lines"),
    ],
)
def test_an_error_line_is_a_refusal_with_words(line: dict[str, object], words: str) -> None:
    with pytest.raises(EngineRefusedError) as refused:
        pull_line(json.dumps(line).encode())
    assert refused.value.message == words


@given(st.one_of(st.binary(max_size=60), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(repr)))
def test_any_line_is_progress_or_an_error_with_words(line: bytes | str) -> None:
    try:
        assert isinstance(pull_line(line if isinstance(line, bytes) else line.encode()), PullProgress)
    except EngineError as error:
        assert error.message


class PullServer:
    """Answers as an engine does when it is connected to, and as the test wants when it is asked to pull."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.query: dict[str, list[str]] = {}
        self.headers: dict[str, str] = {}
        self.asked = asyncio.Event()
        self.left = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                target = urlsplit(head.split(" ")[1])
                if not target.path.endswith("/images/create"):
                    body = json.dumps({"ApiVersion": "1.41", "MinAPIVersion": "1.12", "Os": "linux", "Arch": "amd64"})
                    writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
                    continue
                lines = [line.partition(": ") for line in head.split("\r\n")[1:]]
                self.headers = {name.lower(): value for name, _, value in lines if name}
                self.query = parse_qs(target.query)
                self.asked.set()
                await self._answer(self, writer)
                return
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    async def wait_left(self, writer: asyncio.StreamWriter) -> None:
        """Until the other side has closed the connection, which ends what is written to it."""
        try:
            while True:
                await write(writer, {"status": "Waiting", "id": LAYER})
        except ConnectionError:
            self.left.set()


async def begin(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    await writer.drain()


async def write(writer: asyncio.StreamWriter, *lines: dict[str, object] | bytes) -> None:
    for line in lines:
        content = line if isinstance(line, bytes) else json.dumps(line).encode() + b"\r\n"
        writer.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
        await writer.drain()


async def end(writer: asyncio.StreamWriter) -> None:
    writer.write(b"0\r\n\r\n")
    await writer.drain()


@asynccontextmanager
async def engine_that(tmp_path: Path, answer: Answer) -> AsyncIterator[tuple[DockerEngine, PullServer]]:
    server = PullServer(answer)
    socket = tmp_path / "engine.sock"
    listener = await asyncio.start_unix_server(server.serve, socket)
    try:
        async with await DockerEngine.connect(f"unix://{socket}") as engine:
            yield engine, server
    finally:
        listener.close()


async def pull(engine: DockerEngine, credentials: RegistryCredentials | None = None) -> list[PullProgress]:
    lines: list[PullProgress] = []
    await engine.pull_image(parse_reference("h:1/x:2"), lines.append, credentials=credentials)
    return lines


async def test_a_whole_stream_is_read_in_order_and_asks_for_one_tag(tmp_path: Path) -> None:
    async def answer(_: PullServer, writer: asyncio.StreamWriter) -> None:
        await begin(writer)
        await write(writer, b'{"status": "a"}\n{"sta', b'tus": "b"}\n', b"\n", b'{"status": "c"}')
        await end(writer)

    async with engine_that(tmp_path, answer) as (engine, server):
        assert [line.status for line in await pull(engine)] == ["a", "b", "c"]
        assert server.query == {"fromImage": ["h:1/x"], "tag": ["2"]}
        assert "x-registry-auth" not in server.headers


async def test_a_login_is_sent_as_the_engine_wants_it(tmp_path: Path) -> None:
    async def answer(_: PullServer, writer: asyncio.StreamWriter) -> None:
        await begin(writer)
        await end(writer)

    login = RegistryCredentials(registry="h:1", server_address="h:1", username="ann", password="pä?>ss")
    async with engine_that(tmp_path, answer) as (engine, server):
        await pull(engine, login)
        sent = json.loads(base64.urlsafe_b64decode(server.headers["x-registry-auth"]))
        assert sent == {"username": "ann", "password": "pä?>ss", "serveraddress": "h:1"}


async def test_an_error_in_a_200_stream_is_a_failure(tmp_path: Path) -> None:
    async def answer(_: PullServer, writer: asyncio.StreamWriter) -> None:
        await begin(writer)
        await write(writer, {"status": "Downloading", "id": LAYER}, {"errorDetail": {"message": "disk full"}})
        await end(writer)

    async with engine_that(tmp_path, answer) as (engine, _):
        with pytest.raises(EngineRefusedError, match="disk full"):
            await pull(engine)


async def test_a_stream_that_is_cut_is_a_failure_with_words(tmp_path: Path) -> None:
    async def answer(_: PullServer, writer: asyncio.StreamWriter) -> None:
        await begin(writer)
        await write(writer, {"status": "Downloading", "id": LAYER})

    async with engine_that(tmp_path, answer) as (engine, _):
        with pytest.raises(EngineUnreachableError, match=r"about image h:1/x:2 broke off: \w+"):
            await pull(engine)


async def test_a_stream_that_ends_in_the_middle_of_a_line_is_a_failure_with_words(tmp_path: Path) -> None:
    async def answer(_: PullServer, writer: asyncio.StreamWriter) -> None:
        await begin(writer)
        await write(writer, b'{"status": "Downl')
        await end(writer)

    async with engine_that(tmp_path, answer) as (engine, _):
        with pytest.raises(EngineError, match="in the middle of a line"):
            await pull(engine)


async def test_a_pull_that_nobody_wants_any_more_is_hung_up_on(tmp_path: Path, no_leaks: None) -> None:
    async def answer(server: PullServer, writer: asyncio.StreamWriter) -> None:
        await begin(writer)
        await server.wait_left(writer)

    async with engine_that(tmp_path, answer) as (engine, server):
        heard = asyncio.Event()
        task = asyncio.create_task(engine.pull_image(parse_reference("x"), lambda _: heard.set()))
        await heard.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await asyncio.wait_for(server.left.wait(), 30.0)


async def test_a_pull_that_is_unwanted_before_the_engine_says_a_word_is_hung_up_on_at_the_first(
    tmp_path: Path, no_leaks: None
) -> None:
    go = asyncio.Event()

    async def answer(server: PullServer, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await begin(writer)
        await server.wait_left(writer)

    async with engine_that(tmp_path, answer) as (engine, server):
        task = asyncio.create_task(pull(engine))
        await server.asked.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        go.set()
        await asyncio.wait_for(server.left.wait(), 30.0)
