"""Docker's JSON to facts, and its HTTP answers to typed errors."""

from __future__ import annotations

import http.client
import json
from datetime import UTC, datetime

import pytest
import requests
import urllib3

from driver_docker.engine import (
    EngineAbsentError,
    EngineConflictError,
    EngineError,
    EngineIncompatibleError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
)
from driver_docker.engine_http import checked
from driver_docker.engine_objects import ContainerSpec, ContainerStatus, TmpfsMount
from driver_docker.engine_wire import (
    container_body,
    container_facts,
    engine_event,
    engine_info,
    image_facts,
    parse_time,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-29T21:42:37.042436789Z", datetime(2026, 11, 29, 21, 42, 37, 42436, tzinfo=UTC)),
        ("2026-11-29T21:42:37.5Z", datetime(2026, 11, 29, 21, 42, 37, 500000, tzinfo=UTC)),
        ("2026-11-29T21:42:37Z", datetime(2026, 11, 29, 21, 42, 37, tzinfo=UTC)),
        ("2026-11-29T23:42:37.123456789+02:00", datetime(2026, 11, 29, 21, 42, 37, 123456, tzinfo=UTC)),
        ("0001-01-01T00:00:00Z", None),
        ("", None),
        (None, None),
        ("yesterday", None),
    ],
)
def test_engine_times_are_utc_and_zero_is_none(text: str | None, expected: datetime | None) -> None:
    assert parse_time(text) == expected


def test_a_container_with_next_to_nothing_decodes() -> None:
    facts = container_facts({"Id": "c"})
    assert facts.status is ContainerStatus.UNKNOWN
    assert (facts.exit_code, facts.finished_at, facts.memory_limit_bytes, facts.networks) == (None, None, None, ())


def test_a_containers_memory_file_systems_are_told_beside_its_mounts() -> None:
    spec = ContainerSpec(
        name="c", image="i", tmpfs=(TmpfsMount(target="/b", options="ro"), TmpfsMount(target="/a", options=""))
    )
    facts = container_facts({"Id": "c", "HostConfig": container_body(spec)["HostConfig"]})
    assert facts.tmpfs_targets == ("/a", "/b")
    assert container_facts({"Id": "c", "HostConfig": {"Tmpfs": None}}).tmpfs_targets == ()


def test_a_container_that_could_not_run_shows_the_engines_words() -> None:
    state = {"Status": "created", "ExitCode": 127, "Error": "no such file", "FinishedAt": "0001-01-01T00:00:00Z"}
    facts = container_facts({"Id": "c", "State": state, "HostConfig": {"Memory": 1024}})
    assert (facts.status, facts.exit_code, facts.error) == (ContainerStatus.CREATED, 127, "no such file")
    assert (facts.finished_at, facts.memory_limit_bytes) == (None, 1024)


def test_an_image_without_a_configuration_decodes() -> None:
    facts = image_facts({"Id": "sha256:1", "Config": None, "RepoTags": None})
    assert (facts.user, facts.working_dir, facts.volumes, facts.tags) == ("", "", (), ())


def test_an_event_keeps_its_own_time_and_the_action_alone() -> None:
    body = {
        "Type": "container",
        "Action": "exec_create: /bin/sh -c secret",
        "Actor": {"ID": "c", "Attributes": {"exitCode": "137"}},
        "timeNano": 1795988557066773000,
    }
    event = engine_event(body)
    assert (event.action, event.object_id, event.exit_code) == ("exec_create", "c", 137)
    assert event.time == datetime(2026, 11, 29, 21, 42, 37, 66773, tzinfo=UTC)
    assert engine_event({}).exit_code is None


@pytest.mark.parametrize(
    ("newest", "oldest", "expected"), [("1.41", "1.12", "1.41"), ("1.99", "1.44", "1.51"), ("1.40", None, "1.40")]
)
def test_the_newest_common_api_version_is_taken(newest: str, oldest: str | None, expected: str) -> None:
    info = engine_info({"ApiVersion": newest, "MinAPIVersion": oldest, "Version": "x"}, {}, "unix:///x")
    assert info.api_version == expected


@pytest.mark.parametrize(
    "version",
    [
        {"ApiVersion": "1.30", "MinAPIVersion": "1.12"},
        {"ApiVersion": "1.60", "MinAPIVersion": "1.55"},
        {},
        {"ApiVersion": "x"},
    ],
)
def test_no_common_api_version_is_an_error(version: dict[str, str]) -> None:
    with pytest.raises(EngineIncompatibleError) as refused:
        engine_info(version, {}, "unix:///x")
    assert "unix:///x" in refused.value.message
    if version.get("ApiVersion", "x") != "x":
        assert all(text in refused.value.message for text in (version["ApiVersion"], "1.40", "1.51"))


def _answer(status: int, body: bytes) -> requests.Response:
    answer = requests.Response()
    answer.status_code = status
    answer._content = body
    return answer


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, EngineAbsentError),
        (409, EngineConflictError),
        (400, EngineRefusedError),
        (403, EngineRefusedError),
        (500, EngineRefusedError),
    ],
)
@pytest.mark.parametrize("body", [json.dumps({"message": "the engine's words"}).encode(), b"the engine's words"])
def test_each_refusal_has_one_type_and_the_engines_words(status: int, kind: type[EngineError], body: bytes) -> None:
    with pytest.raises(EngineError) as raised:
        checked(lambda: _answer(status, body), "x")
    assert type(raised.value) is kind
    assert raised.value.message == "the engine's words"


@pytest.mark.parametrize("status", [200, 204, 304])
def test_done_and_already_so_are_answers(status: int) -> None:
    assert checked(lambda: _answer(status, b""), "x").status_code == status


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (requests.exceptions.ReadTimeout(), EngineTimeoutError),
        (requests.exceptions.ConnectTimeout(), EngineTimeoutError),
        (TimeoutError(), EngineTimeoutError),
        (
            requests.exceptions.ConnectionError(ConnectionRefusedError(111, "Connection refused")),
            EngineUnreachableError,
        ),
        (urllib3.exceptions.ProtocolError("cut"), EngineUnreachableError),
        (FileNotFoundError(2, "No such file or directory"), EngineUnreachableError),
    ],
)
def test_an_engine_that_cannot_be_asked_is_never_absent(fault: Exception, kind: type[EngineError]) -> None:
    def send() -> requests.Response:
        raise fault

    with pytest.raises(EngineError) as raised:
        checked(send, "container c")
    assert type(raised.value) is kind
    assert not isinstance(raised.value, EngineAbsentError)
    assert raised.value.retryable
    assert "container c" in raised.value.message


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "Connection refused"),
        (
            http.client.RemoteDisconnected("Remote end closed connection without response"),
            "Remote end closed connection without response",
        ),
    ],
)
def test_the_cause_is_told_in_its_own_words(fault: Exception, cause: str) -> None:
    def send() -> requests.Response:
        raise requests.exceptions.ConnectionError(urllib3.exceptions.ProtocolError("Connection aborted.", fault))

    with pytest.raises(EngineUnreachableError) as raised:
        checked(send, "container c")
    assert raised.value.message == f"the engine cannot be reached about container c: {cause}"


def test_a_cut_answer_is_told_in_words_and_an_error_without_words_names_its_object() -> None:
    def send() -> requests.Response:
        fault = http.client.BadStatusLine("HTTP/1.1")
        raise requests.exceptions.ConnectionError(urllib3.exceptions.ProtocolError("Connection aborted.", fault))

    with pytest.raises(EngineUnreachableError) as cut:
        checked(send, "the list of containers")
    assert cut.value.message == (
        "the engine cannot be reached about the list of containers: its answer is no whole HTTP answer"
    )
    with pytest.raises(EngineError, match="answered 500 about /bin/sh/x of container c"):
        checked(lambda: _answer(500, b""), "/bin/sh/x of container c")
