"""The first program of the project's README: it does what its comments promise, as often as it is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripted.gateway import ScriptedGateway, sandbox

from openshell.verdicts import Component, Verdict, VerdictKind
from openshell.wire.v1 import openshell_pb2 as pb

_README = Path(__file__).parents[3] / "README.md"
_ADDRESS = "http://127.0.0.1:17670"


def snippet(gateway: ScriptedGateway) -> str:
    """The program, pointed at another gateway."""
    (found,) = re.findall(r"```python\n(.*?)```", _README.read_text("utf-8"), re.DOTALL)
    assert isinstance(found, str)
    assert _ADDRESS in found
    return found.replace(_ADDRESS, gateway.endpoint)


def failing(gateway: ScriptedGateway, verdict: Verdict | None) -> None:
    message = "could not start the agent's program '/bin/make': no such file or directory"
    seen = sandbox("build", pb.SANDBOX_PHASE_ERROR, reason="ControlSupervisorStartFailed", message=message)
    gateway.streams["build"] = [pb.SandboxStreamEvent(sandbox=seen)]
    told = [] if verdict is None else [pb.PlatformEvent(metadata=verdict.to_metadata())]
    gateway.streams["build/past"] = [pb.SandboxStreamEvent(event=event) for event in told]


def test_it_tells_why_and_can_be_run_again(gateway: ScriptedGateway, capsys: pytest.CaptureFixture[str]) -> None:
    failing(
        gateway,
        Verdict(
            kind=VerdictKind.EXITED,
            component=Component.SUPERVISOR,
            exit_code=78,
            reason="ControlSupervisorStartFailed",
            words="no make",
        ),
    )
    program = compile(snippet(gateway), "README.md", "exec")
    for _ in range(2):
        exec(program, {})
        out = capsys.readouterr().out
        assert "cannot become ready: phase Error" in out
        assert "no such file or directory" in out
        assert "78" in out
        assert "no make" in out
        assert not gateway.sandboxes


def test_without_a_supervisor_it_says_so(gateway: ScriptedGateway, capsys: pytest.CaptureFixture[str]) -> None:
    failing(gateway, None)
    exec(compile(snippet(gateway), "README.md", "exec"), {})
    assert capsys.readouterr().out.endswith("no supervisor ran\n")
