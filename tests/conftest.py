"""What every test may use: the engine, the images, labels that clean up after themselves, and a leak check."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import sys
import tempfile
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest
from scripted.ownership import OwnerLabel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from docker import APIClient

ENGINE_FIXTURES = {"docker_host", "docker_client", "workload_image", "runtime_image", "supervisor_image", "owner_label"}
THREAD_END_SECONDS = 5.0
LONGEST_TEMPORARY_FOLDER_BYTES = 24
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")

_engine_outcomes = pytest.StashKey[Counter[str]]()
_poller_kept = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Count the outcomes of engine tests from the start; keep temporary folders short."""
    _shorten_temporary_folder()
    config.stash[_engine_outcomes] = Counter()


def _shorten_temporary_folder() -> None:
    """Sockets lie in the tests' temporary folders, and the path of a socket has at most 107 bytes."""
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TEMPORARY_FOLDER_BYTES:
        short = next((folder for folder in SHORT_FOLDERS if os.access(folder, os.W_OK | os.X_OK)), None)
        if short is not None:
            os.environ["TMPDIR"] = short
            tempfile.tempdir = None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs an engine: everything under tests/engine and tests/e2e, and users of an engine fixture."""
    for item in items:
        folders = {parent.name for parent in item.path.parents}
        fixtures = set(getattr(item, "fixturenames", ()))
        if folders & {"engine", "e2e"} or fixtures & ENGINE_FIXTURES:
            item.add_marker(pytest.mark.engine)
            if os.environ.get("OPENSHELL_TEST_NO_ENGINE") == "1":
                item.add_marker(pytest.mark.skip(reason="engine tests are switched off"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Keep one grpc poller for all tests, as soon as anything has imported grpc.

    grpc ends its poller with its last object and starts another with the next one. Tests have an event loop each, and a
    poller that ends while their loops change crashes the process now and then.
    """
    stash = item.config.stash
    if "grpc" in sys.modules and not stash.get(_poller_kept, False):
        from grpc import aio

        aio.init_grpc_aio()
        stash[_poller_kept] = True


class _EngineOutcomes:
    """Counts how engine tests ended."""

    def __init__(self, counter: Counter[str]) -> None:
        self._counter = counter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "engine" not in report.keywords:
            return
        if report.when == "call":
            self._counter["skipped" if report.skipped else "ran"] += 1
        elif report.when == "setup" and report.skipped:
            self._counter["skipped"] += 1
        elif report.when == "setup" and report.failed:
            self._counter["could not start"] += 1


def pytest_sessionstart(session: pytest.Session) -> None:
    """Begin counting."""
    session.config.pluginmanager.register(_EngineOutcomes(session.config.stash[_engine_outcomes]), "engine-outcomes")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many engine tests really ran."""
    outcomes = config.stash[_engine_outcomes]
    others = "".join(f", {count} {name}" for name, count in sorted(outcomes.items()) if name != "ran")
    terminalreporter.write_line(f"engine tests: {outcomes['ran']} ran{others}")


@pytest.fixture(autouse=True)
def _logs_go_where_each_test_looks() -> Iterator[None]:
    """A command that a test runs in this process configures its logs, for a stream that ends with the test."""
    yield
    if "structlog" in sys.modules:
        import structlog

        structlog.reset_defaults()


def _unavailable(reason: str) -> NoReturn:
    if os.environ.get("OPENSHELL_REQUIRE_ENGINE") == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def docker_host() -> str:
    """Address of a responsive engine; without one the test is skipped, or fails where an engine is required."""
    from devtools.engine_discovery import find_engine

    found = find_engine(os.environ)
    if found.address is None:
        _unavailable(f"no Docker Engine answers: {found.explanation}")
    return found.address


@pytest.fixture
def docker_client(docker_host: str) -> Iterator[APIClient]:
    """A low-level client of the engine."""
    import docker

    client = docker.APIClient(base_url=docker_host, version="auto", timeout=60)
    try:
        yield client
    finally:
        client.close()


def _image(role: str) -> str:
    variable = f"OPENSHELL_TEST_{role.upper()}_IMAGE"
    reference = os.environ.get(variable)
    if not reference:
        _unavailable(f"{variable} is not set (./dev test sets it)")
    return reference


@pytest.fixture
def workload_image(docker_host: str) -> str:
    """Reference of the demo workload image, loaded in the engine."""
    return _image("workload")


@pytest.fixture
def runtime_image(docker_host: str) -> str:
    """Reference of the sandbox runtime image, loaded in the engine."""
    return _image("runtime")


@pytest.fixture
def supervisor_image(docker_host: str) -> str:
    """Reference of the reference supervisor image, loaded in the engine."""
    return _image("supervisor")


def _owned(client: APIClient, label: OwnerLabel) -> list[tuple[str, str]]:
    filters = {"label": label.filter}
    found = [("container", item["Id"]) for item in client.containers(all=True, filters=filters)]
    found += [("volume", item["Name"]) for item in client.volumes(filters=filters)["Volumes"] or []]
    found += [("network", item["Id"]) for item in client.networks(filters=filters)]
    found += [("image", item["Id"]) for item in client.images(filters=filters)]
    return found


@pytest.fixture
def owner_label(docker_client: APIClient) -> Iterator[OwnerLabel]:
    """A label of this test alone; what carries it is removed at the end, and that it is gone is asserted."""
    from docker.errors import NotFound

    label = OwnerLabel(value=secrets.token_hex(8), run=os.environ.get("OPENSHELL_TEST_RUN", "by-hand"))
    yield label
    removers: dict[str, Callable[[str], object]] = {
        "container": lambda name: docker_client.remove_container(name, force=True, v=True),
        "volume": lambda name: docker_client.remove_volume(name, force=True),
        "network": docker_client.remove_network,
        "image": lambda name: docker_client.remove_image(name, force=True),
    }
    for kind, name in _owned(docker_client, label):
        with suppress(NotFound):
            removers[kind](name)
    assert _owned(docker_client, label) == [], "left over after removal"


def _descriptors() -> set[tuple[int, str]]:
    found: set[tuple[int, str]] = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.add((int(entry.name), str(entry.readlink())))
    # The kernel objects behind pollers are kept by libraries for the whole process; sockets, pipes and files are not.
    return {(number, target) for number, target in found if not target.startswith(("anon_inode:", "/proc/"))}


@pytest.fixture
def _no_thread_or_descriptor_left() -> Iterator[None]:
    gc.collect()
    threads, descriptors = set(threading.enumerate()), _descriptors()
    yield
    gc.collect()
    new_threads = [thread for thread in threading.enumerate() if thread not in threads]
    for thread in new_threads:
        thread.join(THREAD_END_SECONDS)
    assert [thread.name for thread in new_threads if thread.is_alive()] == [], "threads left behind"
    assert sorted(_descriptors() - descriptors) == [], "descriptors left behind"


@pytest.fixture
async def no_leaks(_no_thread_or_descriptor_left: None) -> AsyncIterator[None]:
    """Fails the test that leaves a thread, a descriptor or an unfinished asyncio task behind.

    Tasks are looked at while the test's loop still runs, threads and descriptors after it was closed, so that the
    loop's own executor is no leak.
    """
    own = asyncio.current_task()
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {own, asyncio.current_task()}
    assert sorted(task.get_name() for task in left) == [], "tasks left behind"
