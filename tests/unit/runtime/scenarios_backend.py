"""Scenarios of the backend, each in a process of its own; see scenarios.py."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from unit.runtime.scenarios import World, live, until

from openshell.isolation.documents import (
    BoundaryBootstrap,
    ListenerTls,
    OuterFence,
    UnixListener,
    VerificationKey,
    WorkloadIdentity,
)
from openshell.isolation.errors import BackendError
from openshell.isolation.operations import (
    AgentSpec,
    Attach,
    ExitStatus,
    LandlockRequirement,
    NetworkMode,
    Policy,
    Signal,
    StartAgent,
)
from sandbox_runtime.accounts import Accounts, parse_accounts
from sandbox_runtime.backend import SandboxBackend
from sandbox_runtime.hardening import ProcessFacts
from sandbox_runtime.landlock import kernel_abi
from sandbox_runtime.logs import Level, Log
from sandbox_runtime.serve import exit_code

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

FLOOR = ProcessFacts(
    uids=frozenset({1000}),
    gids=frozenset({1000}),
    groups=frozenset({1000}),
    capabilities=frozenset(),
    no_new_privs=True,
    seccomp_filter=True,
)
DEVICES = "Inter-|\n face |\n    lo: 0 0\n"
PASSWD = "root:x:0:0::/root:/bin/sh\nagent:x:1000:1000::/home/agent:{shell}\n"
CLAIMS = {"docker.container_id": "c", "docker.image_identity": "i"}
POLICY = Policy(
    read_only=("/usr", "/bin", "/lib", "/lib64", "/etc", "/proc"),
    read_write=("/tmp", "/dev"),
    include_workdir=False,
    landlock=LandlockRequirement.HARD_REQUIREMENT,
)


@dataclass
class FakeContainer:
    """A container as the test wants it; this machine's kernel by default."""

    abi: int = field(default_factory=kernel_abi)
    facts: ProcessFacts = FLOOR
    devices: str = DEVICES
    shell: str = "/bin/sh"

    def landlock_abi(self) -> int:
        return self.abi

    def process_facts(self) -> ProcessFacts:
        return self.facts

    def network_devices(self) -> str:
        return self.devices

    def accounts(self) -> Accounts:
        return parse_accounts(PASSWD.format(shell=self.shell), "agent:x:1000:\n")


def make(world: World, container: FakeContainer | None = None) -> SandboxBackend:
    bootstrap = BoundaryBootstrap(
        boundary_id="sandbox-1",
        generation="generation-1",
        session_id="11111111-1111-4111-8111-111111111111",
        session_rotation=1,
        auth_epoch=1,
        gateway_id="gateway-1",
        verification_keys=(VerificationKey(key_id="k", public_key_pem="PEM"),),
        listener=UnixListener(
            socket_path="/c.sock", tls=ListenerTls(certificate_chain_path="/crt", private_key_path="/key")
        ),
        resource_claims=CLAIMS,
        workload_identity=WorkloadIdentity(uid=1000, gid=1000, resource_digest="sha256:0"),
        outer_fence=OuterFence.attest(generation="generation-1", evidence=b"{}"),
        child_env={"CHILD": "from the driver", "BOTH": "from the driver"},
    )
    return SandboxBackend(
        bootstrap=bootstrap,
        reaper=world.reaper,
        tree=world.tree,
        log=Log(Level.ERROR),
        container=container or FakeContainer(),
    )


def attach_with(policy: Policy) -> Attach:
    return Attach(supervisor_instance_id="s", policy=policy, resource_claims=CLAIMS)


def start_with(*arguments: str, interactive: bool = False, timeout_secs: int = 0, workdir: str = "/") -> StartAgent:
    program, *args = arguments or ("",)
    spec = AgentSpec(
        program=program, args=tuple(args), workdir=workdir, interactive=interactive, timeout_secs=timeout_secs
    )
    return StartAgent(sandbox_id="sandbox-1", spec=spec, policy=POLICY)


async def words(attempt: Awaitable[object], otherwise: str) -> str:
    try:
        await attempt
    except BackendError as error:
        return error.message
    return otherwise


def told(status: ExitStatus) -> dict[str, object]:
    return {"kind": status.kind.value, "value": status.value}


async def ran(backend: SandboxBackend, request: StartAgent) -> ExitStatus:
    await backend.attach(attach_with(POLICY))
    started = await backend.start_agent(request)
    return await backend.wait(started.process_id)


def text(backend: SandboxBackend) -> str:
    return b"".join(piece.data for piece in backend.main_output()).decode()


async def refusals(world: World) -> dict[str, object]:
    policies = {
        "other uid": replace(POLICY, run_as_user="1500"),
        "other user": replace(POLICY, run_as_user="root"),
        "unknown user": replace(POLICY, run_as_user="ghost"),
        "other group": replace(POLICY, run_as_group="7"),
        "open network": replace(POLICY, network=NetworkMode.ALLOW),
        "version": replace(POLICY, version=2),
        "relative path": replace(POLICY, read_only=("usr",)),
    }
    backend = make(world)
    found: dict[str, object] = {
        name: await words(backend.attach(attach_with(policy)), "attached") for name, policy in policies.items()
    }
    old = make(world, FakeContainer(abi=2))
    found["old kernel"] = await words(old.attach(attach_with(POLICY)), "attached")
    same = replace(POLICY, run_as_user="agent", run_as_group="1000")
    found["same user"] = await words(backend.attach(attach_with(same)), "attached")
    return found


async def confirmations(world: World) -> dict[str, object]:
    async def confirmed(container: FakeContainer) -> dict[str, str] | str:
        backend = make(world, container)
        await backend.attach(attach_with(POLICY))
        try:
            properties = (await backend.confirm()).properties
        except BackendError as error:
            return error.message
        return {
            name: getattr(properties, name).mechanism
            for name in ("filesystem_confinement", "egress_interception", "request_attribution", "privilege_floor")
        }

    oldest = await confirmed(FakeContainer(abi=3))
    assert isinstance(oldest, dict)
    return {
        "good": await confirmed(FakeContainer(abi=7)),
        "oldest kernel": oldest["filesystem_confinement"],
        "interface": await confirmed(FakeContainer(devices=DEVICES + "  eth0: 0 0\n")),
        "capability": await confirmed(FakeContainer(facts=replace(FLOOR, capabilities=frozenset({"CapEff"})))),
        "unattached": await words(make(world).confirm(), "confirmed"),
    }


async def environment(world: World) -> dict[str, object]:
    backend = make(world)
    request = replace(start_with("env"), provider_env={"PROVIDED": "placeholder", "BOTH": "from the provider"})
    status = await ran(backend, request)
    return {"status": told(status), "output": text(backend)}


async def output(world: World) -> dict[str, object]:
    backend = make(world)
    status = await ran(backend, start_with("sh", "-c", "echo out; sleep 0.2; echo err >&2; exit 3"))
    (process,) = (await backend.snapshot()).processes
    assert process.status is not None
    return {
        "status": told(status),
        "pieces": [[piece.channel, piece.data.decode()] for piece in backend.main_output()],
        "snapshot": {
            "terminal": process.terminal,
            "status": process.status.value,
            "first": process.retained_output.first_sequence,
            "next": process.retained_output.next_sequence,
            "truncated": process.retained_output.truncated,
        },
    }


async def terminal(world: World) -> dict[str, object]:
    backend = make(world)
    script = "test -t 0 && test -t 1 && echo tty < /dev/tty; stty size; echo $TERM"
    await ran(backend, start_with("sh", "-c", script, interactive=True))
    (process,) = (await backend.snapshot()).processes
    return {"lines": text(backend).split("\r\n")[:-1], "terminal": process.terminal}


async def login_shell(world: World) -> dict[str, object]:
    shell = Path(sys.argv[2]) / "shell"
    backend = make(world, FakeContainer(shell=str(shell)))
    shell.write_text('#!/bin/sh\necho "$1:/bin/echo-me"\n')
    shell.chmod(0o755)
    await ran(backend, start_with())
    return {"output": text(backend)}


async def failed_start(world: World) -> dict[str, object]:
    backend = make(world)
    await backend.attach(attach_with(POLICY))
    good = start_with("true")
    return {
        "missing": await words(backend.start_agent(start_with("/bin/x")), "started"),
        "files": await words(backend.start_agent(replace(good, provider_files={"a": b""})), "started"),
        "again": (await backend.wait((await backend.start_agent(good)).process_id)).kind.value,
        "twice": await words(backend.start_agent(good), "started"),
    }


async def signals(world: World) -> dict[str, object]:
    backend = make(world)
    await backend.attach(attach_with(POLICY))
    process_id = (await backend.start_agent(start_with("sh", "-c", "sleep 300; exit 1"))).process_id
    await until(lambda: len(live(world)) == 2)
    waiting = asyncio.ensure_future(backend.wait(process_id))
    await backend.signal(process_id, Signal.TERM)
    return {
        "status": told(await waiting),
        "again": told(await backend.wait(process_id)),
        "after": await words(backend.signal(process_id, Signal.KILL), "sent"),
        "unknown": await words(backend.signal("generation-1:other", Signal.KILL), "sent"),
    }


async def time_limit(world: World) -> dict[str, object]:
    return {"status": told(await ran(make(world), start_with("sleep", "300", timeout_secs=1)))}


async def end_of_boundary(world: World) -> dict[str, object]:
    backend = make(world)
    await backend.attach(attach_with(POLICY))
    await backend.start_agent(start_with("sh", "-c", "setsid sleep 300 & exec sleep 301"))
    await until(lambda: len(live(world)) == 2)
    await backend.terminate_boundary()
    return {
        "left": len(world.tree.members()),
        "exit_code": exit_code(backend, recovery_expired=False),
        "lost": backend.supervisor_lost,
        "start": await words(backend.start_agent(start_with("true")), "started"),
        "again": await words(backend.terminate_boundary(), "ended"),
    }


async def lost_supervisor(world: World) -> dict[str, object]:
    backend = make(world)
    await backend.attach(attach_with(POLICY))
    marker = sys.argv[2]
    await backend.start_agent(start_with("sh", "-c", f"trap 'touch {marker}' TERM; while :; do sleep 0.01; done"))
    await until(lambda: bool(live(world)))
    await backend.freeze()
    await backend.resume()
    resumed = all(entry.state != "T" for entry in live(world)) or await _runs_again(world)
    await backend.freeze()
    frozen = sorted({entry.state for entry in live(world)})
    await backend.terminate_boundary()
    return {
        "frozen": frozen,
        "resumed": resumed,
        "left": len(world.tree.members()),
        "exit_code": exit_code(backend, recovery_expired=False),
        "marker": os.access(marker, os.F_OK),
    }


async def _runs_again(world: World) -> bool:
    await until(lambda: any(entry.state != "T" for entry in live(world)))
    return True


async def never_started(world: World) -> dict[str, object]:
    backend = make(world)
    await backend.attach(attach_with(POLICY))
    await backend.terminate_boundary()
    return {
        "by request": exit_code(backend, recovery_expired=False),
        "for want of a supervisor": exit_code(backend, recovery_expired=True),
    }


async def main() -> None:
    """Run the scenario that is named on the command line."""
    scenario: Callable[[World], Awaitable[dict[str, object]]] = globals()[sys.argv[1]]
    world = World()
    try:
        async with asyncio.timeout(40):
            result = await scenario(world)
    finally:
        await world.tree.terminate(grace_seconds=0)  # also when it failed: nothing may outlive the test
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main())
