"""The runtime from start to end in a real container."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from openshell.isolation.errors import DeniedError, ProcessError
from openshell.isolation.operations import AgentSpec, ExitStatus, Policy, Signal

if TYPE_CHECKING:
    from engine.runtime.conftest import Sandboxes

MAIN = "generation-1:main"
POLICY = Policy(read_only=("/bin", "/etc", "/proc"), read_write=("/tmp", "/dev/null"))


async def test_an_agent_runs_and_its_code_is_the_containers(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.start()
    client, started = await sandbox.started("echo $GREETING; exit 7", policy=POLICY)
    assert started.process_id == MAIN
    assert await client.wait(MAIN) == ExitStatus.exited(7)
    assert await client.wait(MAIN) == ExitStatus.exited(7)
    assert await sandbox.running()
    await client.terminate_boundary()
    assert await sandbox.ended() == 7


async def test_a_program_that_is_not_there_is_named_and_another_may_follow(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.start()
    client = await sandbox.supervisor()
    await client.attach(POLICY)
    await client.confirm()
    with pytest.raises(ProcessError, match="cannot execute /bin/x: no such file or directory"):
        await client.start_agent(AgentSpec(program="/bin/x"), POLICY)
    with pytest.raises(ProcessError, match="not found in PATH"):
        await client.start_agent(AgentSpec(program="nonsense"), POLICY)
    await client.start_agent(AgentSpec(program="true"), POLICY)
    assert await client.wait(MAIN) == ExitStatus.exited(0)


async def test_nothing_that_was_staged_is_left(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.start()
    await sandbox.listening()
    folder = sandbox.channel / "sandbox"
    assert [path.name for path in folder.iterdir()] == ["control.sock"]
    assert (folder / "control.sock").stat().st_mode & 0o777 == 0o666


async def test_the_confirmation_is_about_this_container(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.start()
    client = await sandbox.supervisor()
    assert (await client.discover_policy()).yaml is None
    await client.attach(POLICY)
    properties = (await client.confirm()).properties
    assert properties.filesystem_confinement.mechanism.startswith("Landlock ABI ")
    assert "no egress path" in properties.egress_interception.mechanism
    assert "uid 1000" in properties.privilege_floor.mechanism


async def test_a_policy_for_another_user_is_refused(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.start()
    client = await sandbox.supervisor()
    with pytest.raises(
        DeniedError, match="run_as_user '1500' differs from the workload's identity, uid 1000"
    ) as caught:
        await client.attach(Policy(run_as_user="1500"))
    assert caught.value.is_refusal


async def test_sigterm_ends_everything_and_the_supervisor_hears_how(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.start()
    client, _ = await sandbox.started("setsid sleep 300 & exec sleep 301", policy=POLICY)
    waiting = asyncio.create_task(client.wait(MAIN))
    await asyncio.sleep(0)
    await sandbox.signal("SIGTERM")
    assert await waiting == ExitStatus.signaled(15)
    assert await sandbox.ended() == 143


async def test_sigterm_before_any_supervisor_ends_it(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.start()
    await sandbox.listening()
    await sandbox.signal("SIGTERM")
    assert await sandbox.ended() == 143


async def test_a_stop_takes_less_than_the_grace_also_with_a_stubborn_agent(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.start()
    await sandbox.started("trap '' TERM; while :; do sleep 1; done", policy=POLICY)
    await sandbox.signal("SIGTERM")
    # The engine would have killed it after this grace: 137.
    assert await sandbox.ended() == 143


async def test_terminating_before_any_start_ends_with_0(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.start()
    client = await sandbox.supervisor()
    await client.attach(POLICY)
    await client.confirm()
    await client.terminate_boundary()
    assert await sandbox.ended() == 0


async def test_signals_reach_the_agent(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.start()
    client, _ = await sandbox.started(
        "trap 'exit 9' HUP; echo > /sandbox/up; while :; do sleep 0.1; done", policy=POLICY
    )
    await sandbox.has_file("/sandbox/up")
    await client.signal(MAIN, Signal.HUP)
    assert await client.wait(MAIN) == ExitStatus.exited(9)


async def test_a_lost_connection_freezes_and_the_same_supervisor_may_come_back(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.start()
    instance = "11111111-2222-4333-8444-555555555555"
    client = await sandbox.supervisor(instance)
    await client.attach(POLICY)
    await client.confirm()
    await client.start_agent(AgentSpec(program="/bin/sleep", args=("301",), workdir="/sandbox"), POLICY)
    await client.close()
    await sandbox.state_of("/bin/sleep 301", "T")
    again = await sandbox.supervisor(instance)
    snapshot = await again.attach(POLICY)
    assert [(process.process_id, process.status) for process in snapshot.processes] == [(MAIN, None)]
    await again.confirm()
    await sandbox.state_of("/bin/sleep 301", "S")
    await again.terminate(MAIN)
    assert await again.wait(MAIN) == ExitStatus.signaled(15)


async def test_orphans_are_reaped(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.start()
    script = "for i in 1 2 3; do (setsid sh -c 'sleep 0.1; exit 1' &); done; sleep 0.5; ps -o stat"
    client, _ = await sandbox.started(f"{{ {script}; }} > /sandbox/result", policy=POLICY)
    await client.wait(MAIN)
    assert "Z" not in await sandbox.file("/sandbox/result")
    assert [line for line in await sandbox.processes() if "sleep" in line] == []


async def test_an_interactive_agent_has_a_terminal_of_its_own(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.start()
    script = "{ tty; stty size; ps -o tty,comm | grep -c '^136,'; } > /sandbox/result 2>&1 < /dev/tty"
    policy = Policy(read_only=("/bin", "/etc", "/proc"), read_write=("/dev/tty", "/dev/null", "/dev/pts"))
    client, _ = await sandbox.started(script, policy=policy, interactive=True)
    assert await client.wait(MAIN) == ExitStatus.exited(0)
    terminal, size, count = (await sandbox.file("/sandbox/result")).splitlines()
    assert terminal in {"/dev/pts/0", "/dev/tty"}
    assert size == "24 80"
    assert int(count) >= 2


async def test_when_memory_runs_out_the_agent_goes_and_its_runtime_tells_of_it(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.start(mem_limit="192m", memswap_limit="192m")
    client, _ = await sandbox.started(
        "exec tail /dev/zero", policy=replace(POLICY, read_only=(*POLICY.read_only, "/dev/zero"))
    )
    assert await client.wait(MAIN) == ExitStatus.signaled(9)
    assert await sandbox.running()
    await client.terminate_boundary()
    assert await sandbox.ended() == 137
