"""What the agent, and what a wrongly made container, cannot do."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest

from devtools.images import images_in_engine
from devtools.images.cache import ArtifactCache
from devtools.images.variants import build_test_image, empty_folder_image
from openshell.isolation.errors import BackendError, ProcessError
from openshell.isolation.operations import AgentSpec, ExitStatus, LandlockRequirement, Policy
from sandbox_runtime import landlock
from sandbox_runtime.errors import RuntimeExit

if TYPE_CHECKING:
    from pathlib import Path

    from docker import APIClient
    from engine.runtime.conftest import Sandboxes
    from scripted.ownership import OwnerLabel

PYTHON = "/.openshell/runtime/python/bin/python3"
SYSTEM = ("/bin", "/etc", "/proc")
USUAL = Policy(read_only=SYSTEM, read_write=("/tmp", "/dev/null"), landlock=LandlockRequirement.HARD_REQUIREMENT)
EVERYTHING = Policy(read_only=SYSTEM, read_write=("/",), landlock=LandlockRequirement.BEST_EFFORT)
WITH_PYTHON = Policy(read_only=(*SYSTEM, "/.openshell/runtime"), read_write=("/tmp", "/dev/null"))

needs_scopes = pytest.mark.skipif(landlock.kernel_abi() < 6, reason="this kernel's Landlock has no scopes")


def outcomes(attempts: dict[str, str]) -> str:
    """A script that prints for each attempt whether it succeeded."""
    return "; ".join(f"if ( {script} ) >/dev/null 2>&1; then echo '{name}'; fi" for name, script in attempts.items())


async def test_the_agent_writes_where_the_policy_says_and_nowhere_else(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.start()
    attempts = {
        "workdir": "echo x > /sandbox/new",
        "tmp": "echo x > /tmp/new",
        "read etc": "cat /etc/passwd",
        "write etc": "echo x > /etc/new",
        "root": "echo x > /new",
        "shm": "echo x > /dev/shm/new",
        "list channel": "ls /.openshell/channel",
        "list runtime": "ls /.openshell/runtime",
        "authority": "echo x > /run/openshell-supervisor-ca/material/new",
    }
    code, text = await sandbox.result_of(outcomes(attempts), policy=USUAL)
    assert (code, text.splitlines()) == (0, ["workdir", "tmp", "read etc"])


async def test_not_even_a_policy_that_allows_everything_opens_the_sandbox_itself(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.start()
    attempts = {
        "tmp": "echo x > /tmp/new",
        "shm": "echo x > /dev/shm/new",
        "socket": "rm /.openshell/channel/sandbox/control.sock",
        "move socket": "mv /.openshell/channel/sandbox/control.sock /.openshell/channel/sandbox/c.sock",
        "channel": "echo x > /.openshell/channel/sandbox/new",
        "runtime": "echo x > /.openshell/runtime/new",
        "authority": "echo x > /run/openshell-supervisor-ca/material/new",
    }
    code, text = await sandbox.result_of(outcomes(attempts), policy=EVERYTHING)
    assert (code, text.splitlines()) == (0, ["tmp", "shm"])


async def test_the_agent_learns_nothing_of_pid_1_and_cannot_end_it(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.start()
    attempts = {
        "see it": "cat /proc/1/stat",
        **{name: f"cat /proc/1/{name}" for name in ("mem", "environ", "maps", "auxv", "syscall", "stack", "io")},
        "descriptors": "ls /proc/1/fd/0",
        "root": "ls /proc/1/root/",
        "terminate": "kill -TERM 1",
        "interrupt": "kill -INT 1",
        "kill": "kill -KILL 1",
        "stop": "kill -STOP 1",
    }
    code, text = await sandbox.result_of(outcomes(attempts), policy=USUAL)
    assert (code, text.splitlines()) == (0, ["see it"] if landlock.kernel_abi() >= 6 else ["see it", "terminate"])
    assert await sandbox.running()


async def test_another_process_of_the_same_user_learns_nothing_of_pid_1_either(sandboxes: Sandboxes) -> None:
    """Not confined by Landlock, as a way around it would be."""
    sandbox = await sandboxes.start()
    await sandbox.listening()
    for name in ("mem", "environ", "maps"):
        code, text = await sandbox.execute("/bin/cat", f"/proc/1/{name}")
        assert code != 0, text
        assert "Permission denied" in text
    await sandbox.execute("/bin/sh", "-c", "kill -TERM 1; kill -INT 1; kill -HUP 1; kill -KILL 1")
    client = await sandbox.supervisor()
    assert (await client.discover_policy()).yaml is None
    said = [line for line in await sandbox.log() if "tried to stop" in line["event"]]
    assert sorted(line["signal"] for line in said) == ["SIGINT", "SIGTERM"]


CONNECT = """
import json, socket
found = {}
names = {line.split()[7] for line in open("/proc/net/unix").read().splitlines()[1:] if len(line.split()) > 7}
for name in sorted(names):
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(5)
    try:
        client.connect("\\0" + name[1:] if name.startswith("@") else name)
        client.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
        answer = client.recv(100)
        found[name.split("-")[1] if name.startswith("@") else name] = "answered" if answer else "closed"
    except OSError as error:
        found[name.split("-")[1] if name.startswith("@") else name] = type(error).__name__
print(json.dumps(found))
"""


@needs_scopes
async def test_the_agent_finds_no_way_around_tls(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.start()
    client = await sandbox.supervisor()
    await client.attach(WITH_PYTHON)
    await client.confirm()
    script = f"import sys; sys.stdout = open('/sandbox/result', 'w')\n{CONNECT}"
    agent = AgentSpec(program=PYTHON, args=("-ISXutf8", "-c", script), workdir="/sandbox")
    await client.start_agent(agent, WITH_PYTHON)
    assert await client.wait("generation-1:main") == ExitStatus.exited(0)
    found: dict[str, str] = json.loads(await sandbox.file("/sandbox/result"))
    assert found.pop("inner") == "PermissionError"
    # What is left are connected sockets: nobody listens there.
    others = {outcome for name, outcome in found.items() if not name.startswith("/")}
    assert others <= {"PermissionError", "ConnectionRefusedError"}
    # The control socket's own path may have been replaced since it was bound; nobody speaks plaintext on it.
    assert {outcome for name, outcome in found.items() if name.startswith("/")} <= {"closed", "FileNotFoundError"}


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        ({"user": "0:0", "uid": 1000}, RuntimeExit.PRIVILEGE, "uid 0"),
        ({"user": "1000:0"}, RuntimeExit.PRIVILEGE, "group 0"),
        ({"cap_drop": []}, RuntimeExit.PRIVILEGE, "capabilities are not dropped"),
        ({"security_opt": []}, RuntimeExit.PRIVILEGE, "no_new_privs is not set"),
        (
            {"security_opt": ["no-new-privileges:true", "seccomp=unconfined"]},
            RuntimeExit.PRIVILEGE,
            "no seccomp filter",
        ),
        (
            {"user": "1000:1000", "group_add": ["1300"]},
            RuntimeExit.PRIVILEGE,
            "supplementary groups are 1300, not none",
        ),
        ({"spoil": {"bootstrap.json": b"{}"}}, RuntimeExit.BOOTSTRAP_INVALID, "bootstrap"),
        ({"spoil": {"server.key": b"no key"}}, RuntimeExit.BOOTSTRAP_INVALID, "key"),
    ],
)
async def test_a_container_that_is_not_as_it_must_be_is_refused_in_one_line(
    sandboxes: Sandboxes, overrides: dict[str, Any], code: RuntimeExit, words: str
) -> None:
    sandbox = await sandboxes.start(**overrides)
    assert await sandbox.ended() == code
    (line,) = await sandbox.log()
    assert line["level"] == "error"
    assert words in line["event"]


async def test_a_container_with_a_network_is_not_confirmed(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.start(network_mode="host", sysctls={})
    client = await sandbox.supervisor()
    await client.attach(USUAL)
    with pytest.raises(BackendError, match="egress path"):
        await client.confirm()
    with pytest.raises(BackendError):
        await client.start_agent(AgentSpec(program="true"), USUAL)


async def test_an_image_with_nothing_in_it_can_run_a_static_program_or_say_what_is_missing(
    sandboxes: Sandboxes, docker_client: APIClient, owner_label: OwnerLabel, tmp_path: Path
) -> None:
    cache = ArtifactCache(tmp_path / "images")
    image = build_test_image(empty_folder_image(), cache=cache, extra_labels=owner_label.labels)
    policy = dataclasses.replace(WITH_PYTHON, include_workdir=False)
    with images_in_engine(docker_client, [image], cache=cache):
        sandbox = await sandboxes.start(image=image.reference)
        client = await sandbox.supervisor()
        await client.attach(policy)
        await client.confirm()
        with pytest.raises(ProcessError, match="cannot execute /bin/sh: no such file or directory"):
            await client.start_agent(AgentSpec(), policy)
        program = AgentSpec(program=PYTHON, args=("-ISc", "import os; os._exit(3 if os.getpid() > 1 else 4)"))
        await client.start_agent(program, policy)
        assert await client.wait("generation-1:main") == ExitStatus.exited(3)
        await client.terminate_boundary()
        assert await sandbox.ended() == 3
        docker_client.remove_container(sandbox.id, force=True, v=True)


@pytest.mark.slow
async def test_an_agent_whose_supervisor_stays_away_is_ended_after_the_recovery_window(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.start()
    client, _ = await sandbox.started("exec sleep 300", policy=USUAL)
    await client.close()
    assert await sandbox.ended() == RuntimeExit.SUPERVISOR_LOST
    events = [line["event"] for line in await sandbox.log()]
    assert "Sandbox Protocol recovery deadline expired; terminating workload" in events
