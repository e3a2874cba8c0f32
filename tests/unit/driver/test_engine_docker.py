"""Answers of another shape than an engine's: one typed error each, and never an empty list."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from typing import TYPE_CHECKING, Any, cast

import pytest
import requests

from driver_docker.engine import EngineError, EngineUnreachableError
from driver_docker.engine_docker import DockerEngine
from driver_docker.engine_objects import ContainerSpec, EngineInfo, VolumeSpec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

INFO = EngineInfo(version="1", api_version="1.41", operating_system="linux", architecture="amd64")
SHAPES: tuple[object, ...] = (
    None,
    {},
    [],
    [None],
    [{}],
    5,
    "text",
    {"Volumes": 5},
    {"State": 5},
    {"Id": "i", "State": "x", "Labels": [1]},
)


class Client:
    """Answers every request with one document."""

    base_url = "http://engine"

    def __init__(self, document: object) -> None:
        self._body = json.dumps(document).encode()

    def request(self, *_: object, **__: object) -> requests.Response:
        answer = requests.Response()
        answer.status_code = 200
        answer._content = self._body
        return answer

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
async def engine_of() -> AsyncIterator[Callable[[object], DockerEngine]]:
    made: list[DockerEngine] = []

    def make(document: object) -> DockerEngine:
        made.append(DockerEngine(cast("Any", Client(document)), INFO))
        return made[-1]

    yield make
    for each in made:
        await each.close()


CALLS: dict[str, Callable[[DockerEngine], Awaitable[object]]] = {
    "inspect_image": lambda engine: engine.inspect_image("i"),
    "create_container": lambda engine: engine.create_container(ContainerSpec(name="c", image="i", labels={})),
    "inspect_container": lambda engine: engine.inspect_container("c"),
    "list_containers": lambda engine: engine.list_containers({}),
    "exec_command": lambda engine: engine.exec_command("c", ("true",), timeout_seconds=1),
    "create_volume": lambda engine: engine.create_volume(VolumeSpec(name="v", labels={})),
    "inspect_volume": lambda engine: engine.inspect_volume("v"),
    "list_volumes": lambda engine: engine.list_volumes({}),
    "refresh_info": lambda engine: engine.refresh_info(),
    "describe": lambda engine: engine.describe(),
}


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
@pytest.mark.parametrize("call", CALLS)
async def test_an_answer_of_another_shape_is_a_typed_error_or_harmless(
    engine_of: Callable[[object], DockerEngine], call: str, shape: object
) -> None:
    try:
        answer = await CALLS[call](engine_of(shape))
    except EngineError as error:
        assert "the engine's answer about" in error.message
    else:
        assert answer != () or shape in ([], {"Volumes": None}), "something else must not look like nothing at all"


async def test_lists_of_an_engine_that_has_nothing_are_empty(engine_of: Callable[[object], DockerEngine]) -> None:
    assert await engine_of([]).list_containers({}) == ()
    assert await engine_of({"Volumes": None}).list_volumes({}) == ()
    assert await engine_of({"Volumes": []}).list_volumes({}) == ()


class HeldClient(Client):
    """Commands do not end before they are let; everything else is answered at once."""

    def __init__(self) -> None:
        super().__init__({"Id": "e"})
        self.held = threading.Semaphore(0)
        self.go_on = threading.Event()

    def request(self, *what: object, **_: object) -> requests.Response:
        if what[0] == "POST" and "/exec/" in str(what[1]):
            self.held.release()
            self.go_on.wait(20)
        return super().request()


async def test_a_stop_does_not_wait_for_commands_that_wait() -> None:
    client = HeldClient()
    engine = DockerEngine(cast("Any", client), INFO)
    probes = [asyncio.create_task(engine.exec_command("c", ("wait",), timeout_seconds=10)) for _ in range(20)]
    try:
        for _ in range(10):
            await asyncio.to_thread(client.held.acquire)
        async with asyncio.timeout(10):
            await engine.stop_container("c", grace_seconds=1)
            await engine.remove_container("c")
        assert not any(probe.done() for probe in probes)
    finally:
        client.go_on.set()
        await asyncio.gather(*probes)
        await engine.close()


async def test_an_engine_that_no_thread_can_ask_is_unreachable(
    engine_of: Callable[[object], DockerEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of([])

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr("threading.Thread.start", refuse)
        with pytest.raises(EngineUnreachableError, match="can't start new thread"):
            await engine.list_containers({})
    assert await engine.list_containers({}) == ()


class AskedClient(Client):
    """Notes what it is asked and answers when it is let."""

    def __init__(self, document: object) -> None:
        super().__init__(document)
        self.asked: list[tuple[str, object]] = []
        self.go_on = threading.Event()

    def request(self, *what: object, **details: object) -> requests.Response:
        self.asked.append((str(what[1]).rpartition("/v1.41")[2], details.get("params")))
        self.go_on.wait(20)
        return super().request()


@pytest.mark.parametrize(
    ("ask", "path"),
    [
        (lambda engine: engine.inspect_image("i"), "/images/i/json"),
        (lambda engine: engine.inspect_volume("v"), "/volumes/v"),
        (lambda engine: engine.ping(), "/_ping"),
    ],
    ids=["inspect_image", "inspect_volume", "ping"],
)
async def test_the_same_question_at_the_same_time_is_asked_once(
    ask: Callable[[DockerEngine], Coroutine[Any, Any, object]], path: str
) -> None:
    client = AskedClient({"Id": "i"})
    engine = DockerEngine(cast("Any", client), INFO)
    asking = [asyncio.create_task(ask(engine)) for _ in range(20)]
    for _ in range(20):
        await asyncio.sleep(0)
    client.go_on.set()
    await asyncio.gather(*asking, return_exceptions=True)
    await engine.close()
    assert [each for each, _ in client.asked] == [path]


async def test_only_events_that_mean_something_are_asked_for() -> None:
    client = AskedClient({})
    client.go_on.set()
    engine = DockerEngine(cast("Any", client), INFO)
    with contextlib.suppress(AttributeError, EngineError):  # the answer is no stream
        await (await engine.subscribe(kind="container", actions={"die", "start"}, labels={"a": "b"})).close()
    await engine.close()
    ((path, params),) = client.asked
    assert path == "/events"
    assert json.loads(cast("dict[str, str]", params)["filters"]) == {
        "type": ["container"], "event": ["die", "start"], "label": ["a=b"],
    }  # fmt: skip
