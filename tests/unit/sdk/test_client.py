from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict
from scripted.gateway import sandbox

from openshell import Goal, OpenShell, Verdict, WatchEvent
from openshell._progress import Progress, progress
from openshell.errors import (
    AlreadyExistsError,
    ClientClosedError,
    InvalidArgumentError,
    MalformedResponseError,
    NotFoundError,
    OpenShellError,
    SandboxFailedError,
    UnavailableError,
    WaitTimeoutError,
)
from openshell.status import StatusCode
from openshell.v1 import DeletionOutcome, SandboxPhase, ServiceStatus
from openshell.verdicts import Component, KilledBy, VerdictKind
from openshell.wire.v1 import openshell_pb2 as pb

if TYPE_CHECKING:
    from scripted.gateway import ScriptedGateway

KILLED = Verdict(
    kind=VerdictKind.KILLED_THROUGH_ENGINE,
    reason="ControlSupervisorExited",
    component=Component.SUPERVISOR,
    exit_code=137,
    signal="SIGKILL",
    killed_by=KilledBy.ENGINE_CLIENT,
)


def status_event(
    name: str, phase: int, *, reason: str = "", message: str = "", cursor: str = ""
) -> pb.SandboxStreamEvent:
    return pb.SandboxStreamEvent(sandbox=sandbox(name, phase, reason=reason, message=message), cursor=cursor)


def verdict_event(verdict: Verdict) -> pb.SandboxStreamEvent:
    return pb.SandboxStreamEvent(
        event=pb.PlatformEvent(type="Warning", reason=verdict.reason, metadata=verdict.to_metadata())
    )


def test_create_sends_every_argument(gateway: ScriptedGateway, client: OpenShell) -> None:
    made = client.sandboxes.create(
        "one",
        image="img:1",
        command=["/bin/true", "x"],
        environment={"A": "b"},
        labels={"team": "red"},
        annotations={"note": "n"},
        cpu_limit="500m",
        memory_limit="64Mi",
        tty=True,
        log_level="debug",
        driver_config={"docker": {"mounts": [{"size_bytes": 8080, "read_only": True, "mode": None}]}},
        request_id="00000000-0000-4000-8000-000000000001",
    )
    assert made.metadata is not None
    assert made.metadata.name == "one"
    assert made.status is not None
    assert made.status.phase is SandboxPhase.PROVISIONING
    sent: pb.CreateSandboxRequest = gateway.requests[-1]
    assert sent.workspace_scope.workspace == "default"
    assert list(sent.spec.command) == ["/bin/true", "x"]
    assert sent.spec.template.image == "img:1"
    assert sent.spec.template.resources["limits"]["cpu"] == "500m"  # type: ignore[index]
    assert sent.spec.template.resources["limits"]["memory"] == "64Mi"  # type: ignore[index]
    mount = MessageToDict(sent.spec.template.driver_config)["docker"]["mounts"][0]
    assert (mount["size_bytes"], mount["read_only"], mount["mode"]) == (8080, True, None)
    assert dict(sent.labels) == {"team": "red"}
    assert dict(sent.spec.environment) == {"A": "b"}
    assert sent.spec.tty
    assert sent.spec.log_level == "debug"
    assert sent.request_id.endswith("1")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**53 + 1, object(), b"x"])
def test_values_without_an_exact_form_are_refused_by_path_and_nothing_is_sent(
    gateway: ScriptedGateway, client: OpenShell, value: object
) -> None:
    with pytest.raises(InvalidArgumentError, match=r"driver_config\.docker\[1\]"):
        client.sandboxes.create("one", driver_config={"docker": [1, value]})
    assert gateway.requests == []


@pytest.mark.parametrize("call", ["get", "delete", "watch", "last_supervisor_exit"])
def test_an_empty_name_is_refused_before_sending(gateway: ScriptedGateway, client: OpenShell, call: str) -> None:
    with pytest.raises(InvalidArgumentError, match="name must not be empty"):
        getattr(client.sandboxes, call)("")
    assert gateway.requests == []


def test_a_command_given_as_one_string_is_refused(client: OpenShell) -> None:
    with pytest.raises(InvalidArgumentError, match="sequence of arguments"):
        client.sandboxes.create("one", command="/bin/true")


def test_statuses_become_error_classes_that_name_call_endpoint_and_cause(
    gateway: ScriptedGateway, client: OpenShell
) -> None:
    with pytest.raises(NotFoundError) as absent:
        client.sandboxes.get("nobody")
    assert absent.value.status is StatusCode.NOT_FOUND
    assert absent.value.rpc == "GetSandbox"
    assert str(absent.value) == f"GetSandbox at {gateway.endpoint} failed with NOT_FOUND: sandbox not found"
    client.sandboxes.create("one")
    with pytest.raises(AlreadyExistsError):
        client.sandboxes.create("one")


def test_an_unreachable_gateway_is_unavailable_and_retryable() -> None:
    with OpenShell("http://127.0.0.1:9") as nobody, pytest.raises(UnavailableError) as caught:
        nobody.health()
    assert caught.value.retryable
    assert isinstance(caught.value, OpenShellError)


def test_health_tells_the_contract_version(client: OpenShell) -> None:
    answer = client.health()
    assert (answer.status, answer.version) == (ServiceStatus.HEALTHY, "0.1.5")


def test_list_follows_pages(gateway: ScriptedGateway, client: OpenShell) -> None:
    for index in range(5):
        gateway.sandboxes[f"s{index}"] = sandbox(f"s{index}", pb.SANDBOX_PHASE_READY)
    names = [found.metadata.name for found in client.sandboxes.list(page_size=2) if found.metadata]
    assert names == [f"s{index}" for index in range(5)]
    assert [request.page_token for request in gateway.requests] == ["", "2", "4"]


def test_delete_tells_the_outcome(client: OpenShell) -> None:
    assert client.sandboxes.delete("x", allow_missing=True).outcome is DeletionOutcome.ALREADY_ABSENT
    client.sandboxes.create("x")
    assert client.sandboxes.delete("x").outcome is DeletionOutcome.ACCEPTED
    with pytest.raises(NotFoundError):
        client.sandboxes.delete("x")


def test_wait_with_a_timeout_of_zero_still_looks_once(gateway: ScriptedGateway, client: OpenShell) -> None:
    gateway.sandboxes["one"] = sandbox("one", pb.SANDBOX_PHASE_READY)
    found = client.sandboxes.wait("one", timeout_seconds=0)
    assert found is not None


def test_wait_reaches_ready_through_the_stream_and_shows_events(gateway: ScriptedGateway, client: OpenShell) -> None:
    gateway.sandboxes["one"] = sandbox("one", pb.SANDBOX_PHASE_PROVISIONING)
    gateway.streams["one"] = [
        status_event("one", pb.SANDBOX_PHASE_PROVISIONING),
        pb.SandboxStreamEvent(event=pb.PlatformEvent(reason="Pulled")),
        status_event("one", pb.SANDBOX_PHASE_READY),
    ]
    seen: list[WatchEvent] = []
    found = client.sandboxes.wait("one", on_event=seen.append)
    assert found is not None
    assert found.status is not None
    assert found.status.phase is SandboxPhase.READY
    assert [event.event.reason for event in seen if event.event] == ["Pulled"]


def test_wait_reopens_a_stream_that_broke_and_resumes_after_its_cursor(
    gateway: ScriptedGateway, client: OpenShell
) -> None:
    gateway.sandboxes["one"] = sandbox("one", pb.SANDBOX_PHASE_PROVISIONING)
    gateway.streams["one"] = [
        status_event("one", pb.SANDBOX_PHASE_PROVISIONING, cursor="7"),
        grpc.StatusCode.UNAVAILABLE,
        status_event("one", pb.SANDBOX_PHASE_READY),
    ]
    assert client.sandboxes.wait("one") is not None
    watches = [request for request in gateway.requests if isinstance(request, pb.WatchSandboxRequest)]
    assert [request.resume_after_cursor for request in watches] == ["", "7"]


def test_wait_fails_at_once_with_condition_and_verdict(gateway: ScriptedGateway, client: OpenShell) -> None:
    gateway.sandboxes["one"] = sandbox("one", pb.SANDBOX_PHASE_PROVISIONING)
    gateway.streams["one"] = [
        verdict_event(KILLED),
        status_event("one", pb.SANDBOX_PHASE_ERROR, reason="ControlSupervisorExited", message="killed with SIGKILL"),
    ]
    with pytest.raises(SandboxFailedError) as caught:
        client.sandboxes.wait("one")
    assert caught.value.last_supervisor_exit == KILLED
    assert "Ready: False (ControlSupervisorExited) - killed with SIGKILL" in str(caught.value)


def test_wait_reads_the_verdict_from_the_past_when_the_stream_did_not_show_it(
    gateway: ScriptedGateway, client: OpenShell
) -> None:
    gateway.sandboxes["one"] = sandbox("one", pb.SANDBOX_PHASE_ERROR)
    gateway.streams["one"] = [status_event("one", pb.SANDBOX_PHASE_ERROR, reason="ControlSupervisorExited")]
    gateway.streams["one/past"] = [verdict_event(KILLED)]
    with pytest.raises(SandboxFailedError) as caught:
        client.sandboxes.wait("one")
    assert caught.value.last_supervisor_exit == KILLED


def test_waiting_for_ready_fails_at_once_on_a_sandbox_that_is_being_deleted(
    gateway: ScriptedGateway, client: OpenShell
) -> None:
    gateway.sandboxes["one"] = sandbox("one", pb.SANDBOX_PHASE_DELETING)
    gateway.streams["one"] = [status_event("one", pb.SANDBOX_PHASE_DELETING)]
    with pytest.raises(SandboxFailedError, match="phase Deleting"):
        client.sandboxes.wait("one")


def test_a_phase_of_a_newer_gateway_is_neither_ready_nor_final(gateway: ScriptedGateway, client: OpenShell) -> None:
    gateway.sandboxes["one"] = sandbox("one", 99)
    gateway.streams["one"] = [status_event("one", 99), status_event("one", pb.SANDBOX_PHASE_READY)]
    assert client.sandboxes.wait("one") is not None


def test_wait_times_out_with_the_last_state(gateway: ScriptedGateway, client: OpenShell) -> None:
    gateway.sandboxes["one"] = sandbox("one", pb.SANDBOX_PHASE_PROVISIONING, reason="Starting", message="pulling")
    gateway.streams["one"] = []
    with pytest.raises(WaitTimeoutError, match=r"phase Provisioning, Ready: False \(Starting\) - pulling") as caught:
        client.sandboxes.wait("one", timeout_seconds=0.1)
    assert isinstance(caught.value, TimeoutError)


def test_waiting_for_deletion_ends_when_the_gateway_knows_the_sandbox_no_more(client: OpenShell) -> None:
    assert client.sandboxes.wait("gone", Goal.DELETED) is None
    with pytest.raises(NotFoundError):
        client.sandboxes.wait("gone", Goal.READY)


def test_last_supervisor_exit_takes_the_newest_verdict_on_a_supervisor(
    gateway: ScriptedGateway, client: OpenShell
) -> None:
    gateway.sandboxes["one"] = sandbox("one", pb.SANDBOX_PHASE_ERROR)
    older = Verdict(
        kind=VerdictKind.EXITED, reason="ControlSupervisorExited", component=Component.SUPERVISOR, exit_code=1
    )
    workload = Verdict(kind=VerdictKind.EXITED, reason="ContainerExited", component=Component.WORKLOAD, exit_code=2)
    gateway.streams["one/past"] = [verdict_event(older), verdict_event(KILLED), verdict_event(workload)]
    assert client.sandboxes.last_supervisor_exit("one") == KILLED


def test_leaving_a_watch_ends_the_stream(gateway: ScriptedGateway, client: OpenShell) -> None:
    gateway.sandboxes["one"] = sandbox("one", pb.SANDBOX_PHASE_READY)
    gateway.streams["one"] = [status_event("one", pb.SANDBOX_PHASE_READY)]
    with client.sandboxes.watch("one") as watch:
        first = next(iter(watch))
    assert first.sandbox is not None
    assert list(watch) == []


def test_a_token_is_sent_as_bearer_and_fetched_for_each_call(gateway: ScriptedGateway) -> None:
    tokens = iter(["first", "second"])
    with OpenShell(gateway.endpoint, token=lambda: next(tokens)) as opened:
        opened.health()
        opened.health()
    assert [found["authorization"] for found in gateway.metadata] == ["Bearer first", "Bearer second"]


@pytest.mark.parametrize(
    "endpoint", ["http://192.0.2.1:80", "http://example.test", "http://0.0.0.0:1", "http://[::]:1"]
)
def test_a_token_never_crosses_the_network_in_plain_text(endpoint: str) -> None:
    with pytest.raises(InvalidArgumentError, match="plain text") as caught:
        OpenShell(endpoint, token="s3cr3t")
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize("token", ["", "s3cr3t\n", "s3cr3t two", "s3cr3t\u00e9", "s3cr3t\0"])
def test_a_token_that_no_header_can_hold_is_refused_without_its_text(gateway: ScriptedGateway, token: str) -> None:
    with (
        OpenShell(gateway.endpoint, token=token) as opened,
        pytest.raises(InvalidArgumentError, match="token") as caught,
    ):
        opened.health()
    assert "s3cr3t" not in str(caught.value)
    assert gateway.requests == []


def test_a_closed_client_says_so(gateway: ScriptedGateway) -> None:
    with OpenShell(gateway.endpoint) as opened:
        pass
    with pytest.raises(ClientClosedError, match="Health at "):
        opened.health()
    with pytest.raises(ClientClosedError, match="WatchSandbox at "):
        opened.sandboxes.watch("one")


@pytest.mark.parametrize(
    "wrong", [{"environment": {"A": 1}}, {"image": "a\ud800b"}, {"labels": {"team": None}}, {"command": [3]}]
)
def test_values_of_a_wrong_type_are_refused_and_nothing_is_sent(
    gateway: ScriptedGateway, client: OpenShell, wrong: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgumentError, match="CreateSandbox"):
        client.sandboxes.create("one", **wrong)
    assert gateway.requests == []


@pytest.mark.parametrize("count", [-1, 2**32, 2**40])
def test_counts_that_the_wire_would_change_are_refused(gateway: ScriptedGateway, client: OpenShell, count: int) -> None:
    with pytest.raises(InvalidArgumentError, match="page_size"):
        list(client.sandboxes.list(page_size=count))
    with pytest.raises(InvalidArgumentError, match="event_tail"):
        client.sandboxes.watch("one", event_tail=count)
    assert gateway.requests == []


def test_a_timeout_may_be_infinite_but_not_nan(gateway: ScriptedGateway, client: OpenShell) -> None:
    gateway.sandboxes["one"] = sandbox("one", pb.SANDBOX_PHASE_PROVISIONING)
    gateway.streams["one"] = [status_event("one", pb.SANDBOX_PHASE_READY)]
    assert client.health(timeout_seconds=float("inf")).version
    assert client.sandboxes.wait("one", timeout_seconds=float("inf")) is not None
    for call in (client.health, lambda timeout_seconds: client.sandboxes.wait("one", timeout_seconds=timeout_seconds)):
        with pytest.raises(InvalidArgumentError, match="NaN"):
            call(timeout_seconds=float("nan"))


def test_a_wait_that_never_reached_the_gateway_says_why() -> None:
    with (
        OpenShell("http://127.0.0.1:1") as opened,
        pytest.raises(WaitTimeoutError, match=r"not known, since GetSandbox at .*UNAVAILABLE") as caught,
    ):
        opened.sandboxes.wait("one", timeout_seconds=0)
    assert isinstance(caught.value.__cause__, UnavailableError)


def test_a_wait_ends_in_time_where_the_gateway_hangs(gateway: ScriptedGateway, client: OpenShell) -> None:
    gateway.sandboxes["one"] = sandbox("one", pb.SANDBOX_PHASE_PROVISIONING)
    gateway.answers.clear()
    try:
        with pytest.raises(WaitTimeoutError, match="DEADLINE_EXCEEDED"):
            client.sandboxes.wait("one", timeout_seconds=0)
    finally:
        gateway.answers.set()


def test_a_gateway_whose_pages_never_end_is_refused(gateway: ScriptedGateway, client: OpenShell) -> None:
    gateway.sandboxes = {name: sandbox(name, pb.SANDBOX_PHASE_READY) for name in ("one", "two")}
    # A page of no sandboxes is followed by itself.
    with pytest.raises(MalformedResponseError, match="page token"):
        list(client.sandboxes.list(page_size=0))


PHASES_OF_GOALS = {
    Goal.READY: ({"READY"}, {"ERROR", "DELETING", "STOPPING", "STOPPED", "COMPLETED"}),
    Goal.STOPPED: ({"STOPPED"}, {"ERROR", "DELETING", "COMPLETED"}),
    Goal.COMPLETED: ({"COMPLETED"}, {"ERROR", "DELETING", "STOPPED"}),
    Goal.DELETED: (set[str](), set[str]()),
}


@pytest.mark.parametrize("goal", Goal)
@pytest.mark.parametrize("phase", SandboxPhase)
def test_every_phase_is_judged_for_every_goal(goal: Goal, phase: SandboxPhase) -> None:
    reached, impossible = PHASES_OF_GOALS[goal]
    expected = Progress.REACHED if phase.name in reached else Progress.PENDING
    assert progress(goal, phase) is (Progress.IMPOSSIBLE if phase.name in impossible else expected)
