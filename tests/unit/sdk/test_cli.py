from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from scripted.gateway import sandbox

from openshell.cli import main
from openshell.verdicts import Component, KilledBy, Verdict, VerdictKind
from openshell.wire.v1 import openshell_pb2 as pb

if TYPE_CHECKING:
    from scripted.gateway import ScriptedGateway


def run(
    arguments: list[str], gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["openshell", "--gateway-endpoint", gateway.endpoint, *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, captured.out, captured.err


@pytest.fixture
def failed(gateway: ScriptedGateway) -> ScriptedGateway:
    gateway.sandboxes["one"] = sandbox(
        "one", pb.SANDBOX_PHASE_ERROR, reason="ControlSupervisorExited", message="killed with SIGKILL (exit code 137)"
    )
    verdict = Verdict(
        kind=VerdictKind.KILLED_THROUGH_ENGINE,
        reason="ControlSupervisorExited",
        component=Component.SUPERVISOR,
        exit_code=137,
        signal="SIGKILL",
        killed_by=KilledBy.ENGINE_CLIENT,
    )
    gateway.streams["one/past"] = [pb.SandboxStreamEvent(event=pb.PlatformEvent(metadata=verdict.to_metadata()))]
    return gateway


def test_get_shows_conditions_and_the_last_exit(
    failed: ScriptedGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(["sandbox", "get", "one"], failed, monkeypatch, capsys)
    assert code == 0
    assert "Phase: Error" in out
    assert "  Ready: False (ControlSupervisorExited) - killed with SIGKILL (exit code 137)" in out
    assert "  killed_by: engine_client" in out
    assert "None" not in out


def test_get_as_json(
    failed: ScriptedGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(["sandbox", "get", "one", "-o", "json"], failed, monkeypatch, capsys)
    facts = json.loads(out)
    assert code == 0
    assert (facts["phase"], facts["reason"]) == ("Error", "ControlSupervisorExited")
    assert facts["last_supervisor_exit"]["exit_code"] == 137


def test_create_list_delete(
    gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(
        ["sandbox", "create", "two", "--image", "i", "-e", "A=b=c", "--no-wait", "--", "/bin/sleep", "5"],
        gateway,
        monkeypatch,
        capsys,
    )
    assert code == 0
    assert "Phase: Provisioning" in out
    created: pb.CreateSandboxRequest = gateway.requests[-1]
    assert list(created.spec.command) == ["/bin/sleep", "5"]
    assert dict(created.spec.environment) == {"A": "b=c"}
    code, out, _ = run(["sandbox", "list"], gateway, monkeypatch, capsys)
    assert code == 0
    assert "two" in out
    code, out, _ = run(["sandbox", "list", "-o", "json"], gateway, monkeypatch, capsys)
    assert [row["name"] for row in json.loads(out)] == ["two"]
    code, out, _ = run(["sandbox", "delete", "two"], gateway, monkeypatch, capsys)
    assert (code, out) == (0, "sandbox two deleted\n")


def test_errors_are_one_line_and_a_code(
    gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(["sandbox", "get", "nobody"], gateway, monkeypatch, capsys)
    assert (code, out) == (1, "")
    assert err.startswith("error: GetSandbox at ")
    assert err.count("\n") == 1
    code, _, err = run(["sandbox", "create", "x", "-e", "novalue"], gateway, monkeypatch, capsys)
    assert code == 2
    assert "--env" in err


@pytest.mark.parametrize(("option", "value"), [("--memory", "512Q"), ("--cpu", "half"), ("--cpu", "1 m")])
def test_a_quantity_that_is_none_is_refused_with_its_option(
    option: str,
    value: str,
    gateway: ScriptedGateway,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = run(["sandbox", "create", "x", option, value], gateway, monkeypatch, capsys)
    assert code == 2
    assert f"'{option}': '{value}' is not a quantity" in err
    assert not gateway.requests


@pytest.mark.parametrize("value", ["512", "1.5", ".5", "512Mi", "1e3", "2G"])
def test_a_quantity_travels_as_it_was_given(
    value: str, gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, _ = run(["sandbox", "create", "x", "--memory", value, "--no-wait"], gateway, monkeypatch, capsys)
    assert code == 0
    limits = gateway.requests[-1].spec.template.resources.fields["limits"].struct_value
    assert limits.fields["memory"].string_value == value


def test_words_of_the_platform_are_never_read_as_markup(
    gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.streams["one"] = [
        pb.SandboxStreamEvent(event=pb.PlatformEvent(reason="Pulling", message="layer [/abc] of [bold]")),
        pb.SandboxStreamEvent(sandbox=sandbox("one", pb.SANDBOX_PHASE_READY, reason="[/odd]")),
    ]
    code, _, err = run(["sandbox", "create", "one"], gateway, monkeypatch, capsys)
    assert (code, "Traceback" in err) == (0, False)
    gateway.sandboxes["one"] = sandbox("one", pb.SANDBOX_PHASE_ERROR, reason="[/odd]")
    code, out, _ = run(["sandbox", "list"], gateway, monkeypatch, capsys)
    assert code == 0
    assert "[/odd]" in out
