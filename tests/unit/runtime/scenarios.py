"""Scenarios that need a process of their own: it owns waitpid(-1) and adopts orphans, as PID 1 does.

Run as ``python scenarios.py NAME [ARGUMENT…]``; prints one JSON object.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sandbox_runtime import confinement, landlock
from sandbox_runtime.confinement import FilesystemPolicy, RealPaths
from sandbox_runtime.errors import LaunchError
from sandbox_runtime.launch import Program, launch
from sandbox_runtime.logs import Level, Log
from sandbox_runtime.reaper import Child, Reaper
from sandbox_runtime.serve import StopRequest
from sandbox_runtime.signals import ReceivedSignal, SignalInbox
from sandbox_runtime.tree import ProcessEntry, ProcessTree

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PR_SET_CHILD_SUBREAPER = 36
SHELL = "/bin/sh"
EVERYTHING = FilesystemPolicy(read_write=("/",))


class World:
    """What PID 1 has: an inbox, a reaper, a tree."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.inbox = SignalInbox((signal.SIGCHLD, signal.SIGTERM))
        self.received: asyncio.Queue[ReceivedSignal] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self.reaper = Reaper(loop)
        self.tree = ProcessTree(reaper=self.reaper)
        self.inbox.on(signal.SIGCHLD, lambda _: void(self.reaper.reap()))
        self.inbox.on(signal.SIGTERM, self.received.put_nowait)
        self.inbox.attach(loop)

    def spawn(self, *arguments: str) -> Child:
        return self.reaper.spawn(lambda: os.posix_spawn(arguments[0], arguments, dict(os.environ), setsigmask=()))

    def shell(self, script: str) -> Child:
        return self.spawn(SHELL, "-c", script)

    async def launch(
        self,
        *arguments: str,
        policy: FilesystemPolicy = EVERYTHING,
        environment: dict[str, str] | None = None,
        working_directory: str = "/",
    ) -> tuple[Child, asyncio.StreamReader]:
        """Launch through the exec launcher with stdout and stderr on a pipe."""
        planned = confinement.plan(policy, abi=landlock.kernel_abi(), view=RealPaths(), protected=("/proc/1",))
        ruleset_fd = confinement.establish(planned)
        reading, writing = os.pipe2(os.O_CLOEXEC)
        nothing = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        try:
            program = Program(
                arguments=arguments,
                environment=environment if environment is not None else {"PATH": "/usr/bin:/bin"},
                working_directory=working_directory,
                ruleset_fd=ruleset_fd,
                standard_fds=(nothing, writing, writing),
            )
            child = await launch(program, self.reaper)
        except BaseException:
            os.close(reading)
            raise
        finally:
            for fd in (ruleset_fd, writing, nothing):
                os.close(fd)
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb")
        )
        return child, reader

    async def output_of(self, *arguments: str, policy: FilesystemPolicy = EVERYTHING) -> tuple[int, str]:
        child, reader = await self.launch(*arguments, policy=policy)
        text = (await reader.read()).decode()
        return (await child.wait()).shell_code, text


def void(_: object) -> None:
    """Drop a value."""


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def statuses(world: World) -> dict[str, object]:
    """Three ends, one of them long before anybody waits."""
    early = world.shell("exit 7")
    late = world.shell("exit 3")
    killed = world.shell("kill -9 $$")
    await world.reaper.wait_childless()
    return {
        "early": (await early.wait()).shell_code,
        "late": str(await late.wait()),
        "killed": str(await killed.wait()),
        "known": early.status is not None,
    }


async def cancelled_waiter(world: World) -> dict[str, object]:
    """A waiter that gives up takes nothing from another."""
    child = world.shell("read line < /dev/zero || exit 5")
    first = asyncio.ensure_future(child.wait())
    second = asyncio.ensure_future(child.wait())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    os.kill(child.pid, signal.SIGKILL)
    return {"first_cancelled": first.cancelled(), "second": str(await second)}


async def orphans(world: World) -> dict[str, object]:
    """Grandchildren whose parent ends come here and are collected."""
    parent = world.shell("(exit 0) & (exit 1) & setsid sh -c 'exit 2' & exit 9")
    await world.reaper.wait_childless()
    return {
        "parent": (await parent.wait()).exit_code,
        "orphans": world.reaper.orphans_reaped,
        "left": len(world.tree.members()),
    }


async def sender_of_a_signal(world: World) -> dict[str, object]:
    """A signal from inside names its sender."""
    child = world.shell(f"kill -TERM {os.getpid()}; exit 0")
    received = await world.received.get()
    return {"number": received.number.name, "from_the_child": received.sender_pid == child.pid}


async def flood_of_stops(world: World) -> dict[str, object]:
    """A process that signals the runtime all the time is ended; one that tries now and then is not."""
    stop = StopRequest(Log(Level.ERROR))
    world.inbox.on(signal.SIGTERM, stop.receive)
    patient = world.shell(f"for i in 1 2 3; do kill -TERM {os.getpid()}; done; exit 6")
    tried = str(await patient.wait())
    flooder = world.shell(f"while :; do kill -TERM {os.getpid()}; done")
    async with asyncio.timeout(20):
        return {"patient": tried, "flooder": str(await flooder.wait()), "asked": stop.asked}


FAMILY = (
    # a daemon (double fork, own session), a child that ignores SIGTERM, and a forking loop, all alive at once
    "(setsid sh -c 'trap \"\" TERM HUP; while :; do sleep 300; done' &) ; "
    "sh -c 'trap \"\" TERM; echo up; while :; do sleep 300; done' & wait"
)


async def started_family(world: World) -> Child:
    child, reader = await world.launch(SHELL, "-c", FAMILY)
    await reader.readline()
    await until(lambda: len(live(world)) >= 5)
    return child


def live(world: World) -> list[ProcessEntry]:
    return [entry for entry in world.tree.members() if not entry.ended]


async def until(condition: Callable[[], bool]) -> None:
    """The kernel does not announce what other processes do in procfs."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.01)


async def terminate_stubborn(world: World) -> dict[str, object]:
    """SIGTERM is ignored by two of them, one of which is a daemon."""
    child = await started_family(world)
    before = len(live(world))
    await world.tree.terminate(grace_seconds=0.2)
    return {"before": before, "left": len(world.tree.members()), "main": (await child.wait()).signal_number}


async def terminate_willing(world: World) -> dict[str, object]:
    """A process that follows SIGTERM is not killed, even when it was stopped."""
    child = world.shell("trap 'exit 21' TERM; kill -STOP $$; while :; do :; done")
    await until(lambda: [entry.state for entry in live(world)] == ["T"])
    started = time.monotonic()
    await world.tree.terminate(grace_seconds=30)
    return {"code": (await child.wait()).exit_code, "before_the_grace": time.monotonic() - started < 30}


async def freeze_and_resume(world: World) -> dict[str, object]:
    """Nothing runs after freezing; what had stopped by itself stays so after resuming."""
    await started_family(world)
    by_itself = world.shell("kill -STOP $$; exit 4")
    await until(lambda: any(entry.pid == by_itself.pid and entry.state == "T" for entry in live(world)))
    frozen = await world.tree.freeze()
    states = sorted({entry.state for entry in live(world)})
    resumed = world.tree.resume()
    await until(lambda: sum(entry.state == "T" for entry in live(world)) == 1)
    still = [entry.pid == by_itself.pid for entry in live(world) if entry.state == "T"]
    await world.tree.terminate(grace_seconds=0)
    return {"frozen": frozen, "states": states, "resumed": resumed, "only_that_one_stays": still == [True]}


async def freeze_a_forking_tree(world: World) -> dict[str, object]:
    """Processes that fork all the time are caught too."""
    for _ in range(3):
        world.shell("while :; do (:; :) & wait; done")
    await until(lambda: len(live(world)) > 3)
    await world.tree.freeze()
    first = {(entry.pid, entry.state) for entry in live(world)}
    second = {(entry.pid, entry.state) for entry in live(world)}
    await world.tree.terminate(grace_seconds=0)
    return {"unchanged": first == second, "all_stopped": {state for _, state in first} == {"T"}}


HEADLESS = """
import ctypes, os, platform, threading, time
def work():
    while True:
        os.write(1, b".")
        time.sleep(0.001)
threading.Thread(target=work).start()
# The first thread ends, the process does not: its own line in procfs says zombie from now on.
ctypes.CDLL(None).syscall(93 if platform.machine() == "aarch64" else 60, 0)
"""


async def headless_process(world: World) -> dict[str, object]:
    """A process whose first thread has ended is still frozen and ended."""
    child, reader = await world.launch(sys.executable, "-I", "-S", "-c", HEADLESS)
    await until(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(") ")[2].startswith("Z"))
    await reader.read(1)
    frozen = await world.tree.freeze()
    first = [entry.state for entry in live(world)]
    world.tree.resume()
    while await reader.read(65536) == b"":
        pass
    await world.tree.terminate(grace_seconds=0)
    return {"frozen": frozen, "states": first, "left": len(world.tree.members())}


SPAWNING = "import os\nwhile True: os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)"


def has_waited_for_a_child(pid: int) -> bool:
    """Whether a process has reaped a child: its waited-for children's minor faults are counted."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return int(fields[8]) > 0


async def freeze_during_vfork(world: World) -> dict[str, object]:
    """A parent that waits for its child's execve cannot stop, but neither can it run."""
    world.spawn(
        sys.executable,
        "-I",
        "-S",
        "-c",
        "import os\nwhile True: os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)",
    )
    await until(lambda: any(has_waited_for_a_child(entry.pid) for entry in live(world)))
    counts = []
    for _ in range(40):
        counts.append(await world.tree.freeze())
        world.tree.resume()
    await world.tree.freeze()
    await world.tree.terminate(grace_seconds=0)
    return {"all": len(counts), "left": len(world.tree.members())}


async def kill_frozen(world: World) -> dict[str, object]:
    """A frozen tree ends without running again."""
    marker = Path(sys.argv[2])
    child = world.shell(f"trap 'touch {marker}' TERM CONT; while :; do :; done")
    await until(lambda: bool(live(world)))
    await world.tree.freeze()
    await world.tree.terminate(grace_seconds=0)
    return {"main": (await child.wait()).signal_number, "ran": os.access(marker, os.F_OK)}


async def launch_echo(world: World) -> dict[str, object]:
    """What the program finds: arguments, environment, folder, session, descriptors, signals, privileges."""
    # As nohup, a supervisor of services or an engine may leave them to PID 1.
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGUSR2, signal.SIGRTMIN + 3):
        signal.signal(number, signal.SIG_IGN)
    script = (
        "echo $1; pwd; env | sort; ls /proc/self/fd | wc -l; cat /proc/self/oom_score_adj; "
        "grep -E '^(Sig(Blk|Ign)|NoNewPrivs):' /proc/self/status"
    )
    child, reader = await world.launch(
        SHELL,
        "-c",
        script,
        "sh",
        "héllo\nworld",
        environment={"A": "ö", "PATH": "/usr/bin:/bin"},
        working_directory="/usr",
    )
    text = (await reader.read()).decode()
    ended = await child.wait()
    return {"text": text, "code": ended.exit_code, "pid": child.pid}


async def launch_session(world: World) -> dict[str, object]:
    """The program leads a session of its own."""
    child, reader = await world.launch(SHELL, "-c", "read x < /proc/self/stat; echo $x; cat /proc/$$/stat")
    fields = (await reader.read()).splitlines()[-1].rpartition(b") ")[2].split()
    return {"group": int(fields[2]) == child.pid, "session": int(fields[3]) == child.pid}


async def launch_failures(world: World) -> dict[str, object]:
    """Why programs cannot be started, in words."""
    folder = Path(sys.argv[2])
    (folder / "plain").write_text("#!/bin/sh\n")
    (folder / "no-interpreter").write_text("#!/nowhere/python\n")
    (folder / "no-interpreter").chmod(0o755)
    (folder / "garbage").write_bytes(b"\x00\x01\x02")
    (folder / "garbage").chmod(0o755)
    tight = FilesystemPolicy(read_only=(str(folder),))
    cases: dict[str, Callable[[], Awaitable[object]]] = {
        "missing": lambda: world.launch("/bin/x"),
        "not in path": lambda: world.launch("no-such-program"),
        "not executable": lambda: world.launch(str(folder / "plain")),
        "folder": lambda: world.launch(str(folder)),
        "interpreter": lambda: world.launch(str(folder / "no-interpreter")),
        "format": lambda: world.launch(str(folder / "garbage")),
        "policy": lambda: world.launch(SHELL, policy=tight),
        "workdir": lambda: world.launch(SHELL, working_directory="/nowhere"),
        "nul": lambda: world.launch(SHELL, "a\0b"),
        "empty": lambda: world.launch(""),
    }
    words: dict[str, object] = {}
    for name, case in cases.items():
        try:
            await case()
        except LaunchError as error:
            words[name] = str(error)
    await world.reaper.wait_childless()
    return words


async def launch_cancelled(world: World) -> dict[str, object]:
    """A launch that is given up leaves no process."""
    attempt = asyncio.ensure_future(world.launch(SHELL, "-c", "sleep 300"))
    await asyncio.sleep(0)  # one step of the attempt: it has spawned the launcher and waits for its report
    spawned = len(live(world))
    attempt.cancel()
    await asyncio.wait({attempt})
    await world.reaper.wait_childless()
    return {"spawned": spawned, "cancelled": attempt.cancelled(), "left": len(world.tree.members())}


async def launch_no_leaks(world: World) -> dict[str, object]:
    """Launching, well or badly, leaves no descriptor open here."""
    await world.output_of("/bin/true")
    before = open_descriptors()
    for _ in range(3):
        await world.output_of("/bin/true")
        try:
            await world.launch("/bin/x")
        except LaunchError:
            continue
    return {"before": before, "after": open_descriptors()}


async def confined(world: World) -> dict[str, object]:
    """What a confined program may do to files, and to what is outside."""
    folder = Path(sys.argv[2])
    for name in ("open", "closed", "readable"):
        (folder / name).mkdir()
        (folder / name / "file").write_text(name)
    policy = FilesystemPolicy(
        read_only=("/usr", "/bin", "/lib", "/lib64", "/etc", "/proc", str(folder / "readable")),
        read_write=(str(folder / "open"), "/dev/null"),
    )
    attempts = {
        "write open": f"echo x > {folder}/open/new",
        "rename inside": f"mv {folder}/open/new {folder}/open/newer",
        "truncate open": f": > {folder}/open/file",
        "read readable": f"cat {folder}/readable/file",
        "write readable": f"echo x > {folder}/readable/new",
        "truncate readable": f": > {folder}/readable/file",
        "delete readable": f"rm {folder}/readable/file",
        "read closed": f"cat {folder}/closed/file",
        "move out": f"mv {folder}/open/file {folder}/closed/moved",
        "null": "echo x > /dev/null",
        "signal outside": f"kill -0 {os.getpid()}",
        "signal own": "kill -0 $$",
    }
    found: dict[str, object] = {}
    for name, script in attempts.items():
        found[name] = (await world.output_of(SHELL, "-c", f"{{ {script}; }} 2>/dev/null", policy=policy))[0] == 0
    return found


async def abstract_sockets(world: World) -> dict[str, object]:
    """An abstract socket outside cannot be reached."""
    server = await asyncio.start_unix_server(lambda _, writer: writer.close(), f"\0openshell-test-{os.getpid()}")
    script = (
        "import socket,sys\ns=socket.socket(socket.AF_UNIX)\n"
        f"try:\n s.connect('\\0openshell-test-{os.getpid()}')\nexcept PermissionError:\n sys.exit(13)\n"
    )
    code, text = await world.output_of(sys.executable, "-I", "-S", "-c", script)
    server.close()
    return {"code": code, "text": text}


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
