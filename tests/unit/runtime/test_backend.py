"""The backend with real processes: it runs in scenarios_backend.py, here is what comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sandbox_runtime import landlock

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Scenario = Callable[..., dict[str, Any]]

pytestmark = pytest.mark.skipif(
    landlock.kernel_abi() < landlock.MINIMUM_ABI, reason="this kernel has no Landlock ABI 3"
)


def test_attach_refuses_what_this_container_is_not(backend_scenario: Scenario) -> None:
    assert backend_scenario("refusals") == {
        "other uid": "run_as_user '1500' differs from the workload's identity, uid 1000",
        "other user": "run_as_user 'root' (uid 0) differs from the workload's identity, uid 1000",
        "unknown user": "run_as_user 'ghost' is not in the image's accounts; the workload runs as uid 1000",
        "other group": "run_as_group '7' differs from the workload's identity, gid 1000",
        "open network": "network: allow asks for unmediated egress, and this container has no egress path",
        "version": "policy version 2 is not known, only 1",
        "relative path": "policy path 'usr' is not absolute and normalised",
        "old kernel": "Landlock ABI 3 or newer is needed, this kernel offers ABI 2: use Linux 6.2 or newer with "
        "Landlock enabled and a seccomp profile that lets it through",
        "same user": "attached",
    }


def test_confirm_states_only_what_is_in_force(backend_scenario: Scenario) -> None:
    found = backend_scenario("confirmations")
    assert found["good"] == {
        "filesystem_confinement": "Landlock ABI 7 (filesystem, signals, abstract sockets)",
        "egress_interception": "no egress path: the network namespace has no interface but the loopback",
        "request_attribution": "no egress path: the network namespace has no interface but the loopback",
        "privilege_floor": "uid 1000, gid 1000, no capabilities, no_new_privs, seccomp filter",
    }
    assert "ABI 3 (filesystem)" in found["oldest kernel"]
    assert "eth0" in found["interface"]
    assert "CapEff" in found["capability"]
    assert "not attached" in found["unattached"]


def test_the_agent_runs_with_the_environment_that_was_given(backend_scenario: Scenario) -> None:
    found = backend_scenario("environment")
    assert found["status"] == {"kind": "exited", "value": 0}
    lines = dict(line.split("=", 1) for line in found["output"].splitlines())
    assert lines["CHILD"] == "from the driver"
    assert lines["PROVIDED"] == "placeholder"
    assert lines["BOTH"] == "from the provider"
    assert lines["USER"] == "agent"
    assert lines["HOME"] == "/home/agent"
    assert not [name for name in lines if name.startswith("OPENSHELL")]


def test_output_is_kept_and_told(backend_scenario: Scenario) -> None:
    assert backend_scenario("output") == {
        "status": {"kind": "exited", "value": 3},
        "pieces": [[1, "out\n"], [2, "err\n"]],
        "snapshot": {"terminal": False, "status": 3, "first": 0, "next": 2, "truncated": False},
    }


def test_an_interactive_agent_has_a_terminal(backend_scenario: Scenario) -> None:
    found = backend_scenario("terminal")
    assert found["lines"] == ["tty", "24 80", "xterm-256color"]
    assert found["terminal"] is True


def test_an_empty_program_is_the_login_shell(backend_scenario: Scenario, tmp_path: Path) -> None:
    assert backend_scenario("login_shell", tmp_path) == {"output": "-l:/bin/echo-me\n"}


def test_a_start_that_fails_says_why_and_may_be_tried_again(backend_scenario: Scenario) -> None:
    assert backend_scenario("failed_start") == {
        "missing": "cannot execute /bin/x: no such file or directory",
        "again": "exited",
        "twice": "the main process was started already",
        "files": "this runtime cannot deliver provider files",
    }


def test_signals_reach_the_group_and_an_end_is_told_to_late_callers(backend_scenario: Scenario) -> None:
    assert backend_scenario("signals") == {
        "status": {"kind": "signaled", "value": 15},
        "again": {"kind": "signaled", "value": 15},
        "after": "process generation-1:main has ended",
        "unknown": "there is no process generation-1:other",
    }


def test_the_time_limit_ends_the_agent(backend_scenario: Scenario) -> None:
    assert backend_scenario("time_limit") == {"status": {"kind": "signaled", "value": 15}}


def test_terminating_the_boundary_leaves_nothing_and_lets_nothing_start(backend_scenario: Scenario) -> None:
    assert backend_scenario("end_of_boundary") == {
        "left": 0,
        "exit_code": 143,
        "lost": False,
        "start": "the boundary is ending",
        "again": "ended",
    }


def test_a_lost_supervisor_freezes_then_kills_without_running_again(backend_scenario: Scenario, tmp_path: Path) -> None:
    assert backend_scenario("lost_supervisor", tmp_path / "marker") == {
        "frozen": ["T"],
        "resumed": True,
        "left": 0,
        "exit_code": 75,
        "marker": False,
    }


def test_an_agent_that_never_started_is_told_by_why_the_boundary_ended(backend_scenario: Scenario) -> None:
    assert backend_scenario("never_started") == {"by request": 0, "for want of a supervisor": 75}
