"""The reaper, the tree and the launcher with real processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sandbox_runtime import landlock

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Scenario = Callable[..., dict[str, Any]]

needs_landlock = pytest.mark.skipif(
    landlock.kernel_abi() < landlock.MINIMUM_ABI, reason="this kernel has no Landlock ABI 3"
)
needs_scopes = pytest.mark.skipif(landlock.kernel_abi() < 6, reason="this kernel's Landlock has no scopes")


def test_an_end_is_delivered_also_to_whoever_asks_later(scenario: Scenario) -> None:
    assert scenario("statuses") == {
        "early": 7,
        "late": "exited with code 3",
        "killed": "ended by SIGKILL",
        "known": True,
    }


def test_a_cancelled_waiter_takes_nothing_from_another(scenario: Scenario) -> None:
    assert scenario("cancelled_waiter") == {"first_cancelled": True, "second": "ended by SIGKILL"}


def test_orphans_are_reaped(scenario: Scenario) -> None:
    assert scenario("orphans") == {"parent": 9, "orphans": 3, "left": 0}


def test_a_signal_names_its_sender(scenario: Scenario) -> None:
    assert scenario("sender_of_a_signal") == {"number": "SIGTERM", "from_the_child": True}


def test_a_process_that_would_hide_a_stop_from_outside_is_ended(scenario: Scenario) -> None:
    assert scenario("flood_of_stops") == {
        "patient": "exited with code 6",
        "flooder": "ended by SIGKILL",
        "asked": False,
    }


@needs_landlock
def test_terminating_ends_daemons_and_what_ignores_sigterm(scenario: Scenario) -> None:
    found = scenario("terminate_stubborn")
    assert found["before"] >= 5
    assert found["left"] == 0


def test_terminating_leaves_a_stopped_process_the_chance_to_end_in_order(scenario: Scenario) -> None:
    assert scenario("terminate_willing") == {"code": 21, "before_the_grace": True}


@needs_landlock
def test_freezing_stops_all_and_resuming_wakes_only_those(scenario: Scenario) -> None:
    found = scenario("freeze_and_resume")
    assert found["states"] == ["T"]
    assert found["resumed"] == found["frozen"] - 1
    assert found["only_that_one_stays"]


def test_freezing_catches_what_forks_all_the_time(scenario: Scenario) -> None:
    assert scenario("freeze_a_forking_tree") == {"unchanged": True, "all_stopped": True}


@needs_landlock
def test_a_process_whose_first_thread_has_ended_is_frozen_and_ended_too(scenario: Scenario) -> None:
    assert scenario("headless_process") == {"frozen": 1, "states": ["T"], "left": 0}


def test_freezing_in_the_middle_of_a_vfork_neither_hangs_nor_fails(scenario: Scenario) -> None:
    assert scenario("freeze_during_vfork") == {"all": 40, "left": 0}


def test_a_frozen_tree_is_killed_without_running_again(scenario: Scenario, tmp_path: Path) -> None:
    assert scenario("kill_frozen", tmp_path / "marker") == {"main": 9, "ran": False}


@needs_landlock
def test_the_program_finds_what_was_asked_for_and_nothing_else(scenario: Scenario) -> None:
    found = scenario("launch_echo")
    lines = found["text"].splitlines()
    assert lines[:2] == ["héllo world", "/usr"]
    assert lines[2:5] == ["A=ö", "PATH=/usr/bin:/bin", "PWD=/usr"]
    assert lines[5] == "4"  # stdin, stdout, stderr and the listing's own
    assert int(lines[6]) >= 500
    status = dict(line.split(":\t") for line in lines[7:])
    assert int(status["SigBlk"], 16) == 0
    assert int(status["SigIgn"], 16) & ~(0b11 << 31) == 0  # the C library keeps 32 and 33 to itself
    assert status["NoNewPrivs"] == "1"
    assert found["code"] == 0


@needs_landlock
def test_the_program_leads_its_own_session(scenario: Scenario) -> None:
    assert scenario("launch_session") == {"group": True, "session": True}


@needs_landlock
def test_a_program_that_cannot_start_is_explained(scenario: Scenario, tmp_path: Path) -> None:
    assert scenario("launch_failures", tmp_path) == {
        "missing": "cannot execute /bin/x: no such file or directory",
        "not in path": "cannot execute no-such-program: not found in PATH (/usr/bin:/bin)",
        "not executable": f"cannot execute {tmp_path}/plain: not an executable file, or not for this user",
        "folder": f"cannot execute {tmp_path}: not an executable file, or not for this user",
        "interpreter": f"cannot execute {tmp_path}/no-interpreter: "
        "the interpreter or loader that it names is not in the image",
        "format": f"cannot execute {tmp_path}/garbage: "
        "neither a program for this machine nor a script with an interpreter line",
        "policy": "cannot execute /bin/sh: the filesystem policy does not allow it, or its loader",
        "workdir": "cannot enter the working directory /nowhere: no such file or directory",
        "nul": "cannot execute: an argument holds a NUL character",
        "empty": "cannot execute an empty program name",
    }


@needs_landlock
def test_a_launch_that_is_given_up_leaves_no_process(scenario: Scenario) -> None:
    assert scenario("launch_cancelled") == {"spawned": 1, "cancelled": True, "left": 0}


@needs_landlock
def test_launching_leaves_no_descriptor_open(scenario: Scenario) -> None:
    found = scenario("launch_no_leaks")
    assert found["before"] == found["after"]


@needs_scopes
def test_a_confined_program_does_what_the_policy_allows_and_no_more(scenario: Scenario, tmp_path: Path) -> None:
    assert scenario("confined", tmp_path) == {
        "write open": True,
        "rename inside": True,
        "truncate open": True,
        "read readable": True,
        "write readable": False,
        "truncate readable": False,
        "delete readable": False,
        "read closed": False,
        "move out": False,
        "null": True,
        "signal outside": False,
        "signal own": True,
    }


@needs_scopes
def test_a_confined_program_cannot_reach_abstract_sockets_outside(scenario: Scenario) -> None:
    assert scenario("abstract_sockets") == {"code": 13, "text": ""}
