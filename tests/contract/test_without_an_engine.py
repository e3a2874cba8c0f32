"""What of the contract and of the field's faults shows without any engine."""

from __future__ import annotations

import ast
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from scripted.deployment import CONTRACT_REASONS

import driver_docker
from driver_docker import encode
from driver_docker.events import Condition, ConditionStatus, Snapshot
from driver_docker.server import MAX_MESSAGE_BYTES
from driver_docker.verdict import Reason
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

SOURCES: Final = tuple(Path(driver_docker.__file__).parent.glob("*.py"))
STARTS_PROCESSES: Final = {"engine_ssh.py", "registry_credentials.py"}
FORKING: Final = {"fork", "forkpty", "multiprocessing", "preexec_fn", "ProcessPoolExecutor", "Popen", "system", "popen"}


def test_checklist_9_every_reason_string_is_the_contracts() -> None:
    transient = {"InspectFailed"}  # of the transient reasons of contract 4.3, the only one beside those of 4.4
    assert {reason.value for reason in Reason} == CONTRACT_REASONS | transient


def test_field_report_56_no_process_is_forked_from_one_that_serves() -> None:
    """Children are made by vfork, which runs none of the fork handlers that grpc hangs in."""
    names = {source.name: _names(source) for source in SOURCES}
    assert {name for name, used in names.items() if "create_subprocess_exec" in used} == STARTS_PROCESSES
    assert {name: used & FORKING for name, used in names.items() if used & FORKING} == {}
    assert subprocess._USE_VFORK


def _names(source: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text("utf-8"))):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found |= set(node.name.split("."))
        elif isinstance(node, ast.keyword) and node.arg:
            found.add(node.arg)
    return found


def test_field_report_59_two_thousand_sandboxes_fit_into_one_answer() -> None:
    conditions = tuple(
        Condition(
            type=kind,
            status=ConditionStatus.FALSE,
            reason="BoundaryChannelCreateFailed",
            message="\N{EURO SIGN}" * 4096,
            transition_time=datetime(2026, 10, 5, tzinfo=UTC),
        )
        for kind in ("Ready",)
    )
    listed = pb.ListSandboxesResponse(
        sandboxes=[
            encode.sandbox(
                Snapshot(
                    sandbox_id=f"00000000-0000-4000-8000-{number:012}",
                    name="n" * 63,
                    namespace="s" * 63,
                    workspace="w" * 63,
                    container_name="c" * 200,
                    container_id="0" * 64,
                    conditions=conditions,
                )
            )
            for number in range(2000)
        ]
    )
    assert listed.ByteSize() < MAX_MESSAGE_BYTES
