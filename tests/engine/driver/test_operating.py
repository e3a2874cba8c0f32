"""The operator's commands on a real engine, beside a running driver and without one."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from typing import TYPE_CHECKING, Any

from scripted import driver_process
from scripted.compute_gateway import ComputeGateway

from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from scripted.driver_bench import DriverBench


async def command(bench: DriverBench, *arguments: str) -> tuple[int, Any]:
    """Run a command with a bench's configuration; its exit code and what its JSON says."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from driver_docker.cli import main; main()",
        *arguments,
        "--output=json",
        *driver_process.flags(bench),
        stdout=PIPE,
        stderr=PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert out, err.decode()
    return process.returncode or 0, json.loads(out)


async def test_check_finds_no_fault_on_an_engine_that_runs_sandboxes(bench: DriverBench) -> None:
    code, document = await command(bench, "check")
    faults = [finding for finding in document["findings"] if finding["level"] == "fault"]
    assert (code, faults) == (0, [])
    assert {finding["check"] for finding in document["findings"]} >= {
        "bind_socket",
        "state_dir",
        "engine",
        "engine API",
        "log driver",
        "storage driver",
        "resource limits",
        "user namespaces",
        "seccomp profile",
        "Landlock",
        "seccomp",
        "GPUs (CDI)",
        "supervisor_image",
        "sandbox_runtime_image",
        "default_image",
        "grpc_endpoint",
    }
    assert not (bench.folder / "state").exists()


async def test_commands_beside_a_driver_and_after_it(bench: DriverBench) -> None:
    address = f"unix:{driver_process.socket_of(bench)}"
    async with driver_process.serving(bench) as process, ComputeGateway(address) as link:
        kept, lost = bench.sandbox("kept"), bench.sandbox("late-6.lost")
        for sandbox in (kept, lost):
            await bench.launch(link, sandbox)
        bench.client.kill(bench.container(lost.id, "supervisor")["Id"], "SIGUSR1")
        await link.wait_reason(lost.id, "ControlSupervisorExited")

        _, document = await command(bench, "sandboxes")
        assert document["driver_runs"]
        shown = {row["sandbox_id"]: row for row in document["sandboxes"]}
        assert (shown[kept.id]["ready"], shown[kept.id]["workload"]["state"]) == ("True", "running")
        assert shown[kept.id]["supervisor"]["state"] == "running"
        assert shown[lost.id]["reason"] == "ControlSupervisorExited"

        code, document = await command(bench, "gc")
        assert (code, document["items"], document["driver_runs"]) == (0, [], True)
        assert (await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=lost.id))).deleted
        await driver_process.kill(process)

    _, document = await command(bench, "exits", lost.id)
    (told,) = document["exits"]
    assert told["verdict"]["openshell.verdict.exit_code"] == "6"
    assert "gateway not reachable" in told["tail"]

    _, document = await command(bench, "sandboxes")
    assert not document["driver_runs"]
    (row,) = document["sandboxes"]
    assert (row["sandbox_id"], row["ready"], row["workload"]["state"]) == (kept.id, "True", "running")
    # What the living sandbox uses is no leftover although no driver runs.
    _, document = await command(bench, "gc", "--dry-run")
    assert document["items"] == []

    async with driver_process.serving(bench) as process, ComputeGateway(address) as link:
        assert (await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=kept.id))).deleted
        assert await driver_process.end(process) == 0
    assert bench.left_over() == []
    _, document = await command(bench, "exits")
    assert [entry["sandbox_id"] for entry in document["exits"]] == [lost.id]


async def test_field_report_52_gc_takes_what_a_killed_driver_left_and_nothing_foreign(bench: DriverBench) -> None:
    wanted = await driver_process.launched_and_killed(bench)
    workload = bench.container(wanted.id, "sandbox")
    own = dict(workload["Config"]["Labels"])
    foreign = bench.client.create_container(
        bench.images.workload,
        entrypoint="/none",
        labels=own | {"openshell.ai/driver-owner": "0" * 32, "openshell.ai/sandbox-id": "foreign"},
        name=f"{bench.namespace}-foreign",
    )["Id"]
    record = bench.folder / "state" / bench.namespace / wanted.id / "record.json"
    record.unlink()

    expected = set(bench.left_over()) - {f"/{bench.namespace}-foreign"}
    code, document = await command(bench, "gc", "--dry-run")
    assert (code, document["foreign_left_alone"]) == (0, 1)
    listed = {item["name"] for item in document["items"] if item["kind"] != "state folder"}
    assert listed == {name.removeprefix("/") for name in expected}
    assert set(bench.left_over()) > expected

    code, document = await command(bench, "gc")
    assert (code, [item["error"] for item in document["items"] if item["error"]]) == (0, [])
    assert bench.left_over() == [f"/{bench.namespace}-foreign"]
    bench.client.remove_container(foreign)
    assert not record.parent.exists()
