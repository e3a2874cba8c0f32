"""The real gateway and the real driver as processes, on a real engine, with whatever they leave removed at the end."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from openshell.wire.datamodel.v1.datamodel_pb2 import WorkspaceSelector
from openshell.wire.v1 import openshell_pb2 as pb
from openshell.wire.v1 import openshell_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from docker import APIClient

WORKSPACE = WorkspaceSelector(workspace="default")
NAMESPACE_LABEL = "openshell.ai/sandbox-namespace"
ROLE_LABEL = "openshell.ai/isolation-role"
SANDBOX_LABEL = "openshell.ai/sandbox-id"
PATIENCE_SECONDS = 60.0


class Stack:
    """Starts, kills and restarts the two processes; speaks to the gateway as a user."""

    def __init__(self, folder: Path, docker_host: str, engine: APIClient, images: dict[str, str]) -> None:
        self.folder = folder
        self.engine = engine
        self.namespace = f"stack-{secrets.token_hex(4)}"
        self._docker_host = docker_host
        self._images = images
        self._port = _free_port()
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self._port}")
        self.stub: pb_grpc.OpenShellAsyncStub = pb_grpc.OpenShellStub(self.channel)

    async def start(self) -> None:
        """Start both and wait until the gateway has its driver."""
        await self.start_gateway()
        await self.start_driver()
        assert await self._line("gateway") == "ready"

    async def start_gateway(self) -> None:
        """Start the gateway on the port that supervisors know."""
        options = ["--listen", f"127.0.0.1:{self._port}", "--state-dir", str(self.folder / "gateway")]
        options += ["--compute-driver-socket", str(self.folder / "run" / "d.sock"), "--client-config", "none"]
        await self._spawn("gateway", "openshell-gateway", options)
        assert (await self._line("gateway")).startswith("listening on ")

    async def ready(self) -> None:
        """Wait for the gateway's handshake with its driver."""
        assert await self._line("gateway") == "ready"

    async def start_driver(self) -> None:
        """Start the driver."""
        options = ["--bind-socket", str(self.folder / "run" / "d.sock"), "--docker-socket", self._docker_host]
        options += ["--grpc-endpoint", f"http://127.0.0.1:{self._port}", "--state-dir", str(self.folder / "driver")]
        options += ["--supervisor-image", self._images["supervisor"], "--default-image", self._images["workload"]]
        options += ["--sandbox-runtime-image", self._images["runtime"], "--sandbox-label", self.namespace]
        await self._spawn("driver", "openshell-driver-docker", options)
        assert (await self._line("driver")).startswith("serving on ")

    async def end(self, name: str, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal to one of the two and wait for its exit code."""
        process = self._running.pop(name)
        process.send_signal(number)
        code, _ = await asyncio.wait_for(asyncio.gather(process.wait(), process.communicate()), PATIENCE_SECONDS)
        return code

    async def close(self) -> None:
        """End what runs and remove what is left."""
        for name in ("driver", "gateway"):
            if name in self._running:
                with contextlib.suppress(ProcessLookupError):
                    await self.end(name)
        await self.channel.close()

    async def create(self, name: str, **spec: Any) -> pb.Sandbox:
        """Create a sandbox as a user."""
        request = pb.CreateSandboxRequest(name=name, workspace_scope=WORKSPACE, spec=pb.SandboxSpec(**spec))
        return (await self.stub.CreateSandbox(request)).sandbox

    async def until(self, name: str, test: Callable[[pb.Sandbox], bool]) -> pb.Sandbox:
        """Follow a sandbox until `test` holds."""
        call = self.stub.WatchSandbox(
            pb.WatchSandboxRequest(sandbox=name, workspace_scope=WORKSPACE, follow_status=True)
        )
        seen: pb.Sandbox | None = None
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                async for event in call:
                    if event.WhichOneof("payload") == "sandbox":
                        seen = event.sandbox
                        if test(seen):
                            return seen
        except TimeoutError:
            raise AssertionError(f"{name} is still {seen}") from None
        finally:
            call.cancel()
        raise AssertionError(f"the watch of {name} ended; last seen {seen}")

    async def until_phase(self, name: str, phase: pb.SandboxPhase.ValueType) -> pb.Sandbox:
        """Follow a sandbox until it has that phase."""
        return await self.until(name, lambda sandbox: sandbox.status.phase == phase)

    async def verdict(self, name: str) -> pb.PlatformEvent:
        """The event that carries a verdict on the sandbox's supervisor."""
        return await self.until_event(
            name, lambda event: event.metadata.get("openshell.verdict.component") == "supervisor"
        )

    async def until_event(self, name: str, test: Callable[[pb.PlatformEvent], bool]) -> pb.PlatformEvent:
        """Follow a sandbox's events, from its first, until `test` holds of one."""
        request = pb.WatchSandboxRequest(sandbox=name, workspace_scope=WORKSPACE, follow_events=True, event_tail=64)
        call = self.stub.WatchSandbox(request)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                async for event in call:
                    if event.WhichOneof("payload") == "event" and test(event.event):
                        return event.event
        finally:
            call.cancel()
        raise AssertionError(f"the watch of {name} ended without such an event")

    async def past_events(self, name: str) -> list[pb.PlatformEvent]:
        """The events of a sandbox so far."""
        request = pb.WatchSandboxRequest(sandbox=name, workspace_scope=WORKSPACE, event_tail=64)
        return [
            event.event
            async for event in self.stub.WatchSandbox(request, timeout=PATIENCE_SECONDS)
            if event.WhichOneof("payload") == "event"
        ]

    def driver_file(self, sandbox: pb.Sandbox, file_name: str) -> bytes:
        """A file that the driver keeps for a sandbox."""
        (path,) = (self.folder / "driver").rglob(f"{sandbox.metadata.id}/{file_name}")
        return path.read_bytes()

    @contextlib.asynccontextmanager
    async def removals(self, role: str) -> AsyncIterator[Callable[[], Awaitable[str]]]:
        """Listen for removed containers of one role; what is yielded waits for the next one and returns its id."""
        labels = [f"{NAMESPACE_LABEL}={self.namespace}", f"{ROLE_LABEL}={role}"]
        events = self.engine.events(filters={"label": labels, "event": "destroy"}, decode=True)

        async def next_removed() -> str:
            return str((await asyncio.to_thread(next, events))["id"])

        try:
            yield next_removed
        finally:
            events.close()

    def log_of(self, name: str) -> str:
        """What one of the two wrote to its log so far."""
        return (self.folder / f"{name}.log").read_text()

    @property
    def gateway_address(self) -> str:
        """Where the gateway listens."""
        return f"127.0.0.1:{self._port}"

    async def delete(self, name: str) -> None:
        """Delete a sandbox and wait until its record is gone."""
        await self.stub.DeleteSandbox(pb.DeleteSandboxRequest(name=name, workspace_scope=WORKSPACE))
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                request = pb.WatchSandboxRequest(sandbox=name, workspace_scope=WORKSPACE, follow_status=True)
                async for _ in self.stub.WatchSandbox(request):
                    pass
        except grpc.aio.AioRpcError as error:
            assert error.code() == grpc.StatusCode.NOT_FOUND

    def containers(self, sandbox: pb.Sandbox, role: str) -> list[dict[str, Any]]:
        """The sandbox's containers of one role."""
        labels = [f"{SANDBOX_LABEL}={sandbox.metadata.id}", f"{ROLE_LABEL}={role}"]
        return list(self.engine.containers(all=True, filters={"label": labels}))

    def left_over(self) -> list[str]:
        """Everything on the engine that carries this stack's namespace, apart from the delivered runtime."""
        filters = {"label": f"{NAMESPACE_LABEL}={self.namespace}"}
        found = [f"container {item['Id']}" for item in self.engine.containers(all=True, filters=filters)]
        volumes = self.engine.volumes(filters=filters)["Volumes"] or []
        return found + [f"volume {item['Name']}" for item in volumes]

    def clear(self) -> None:
        """Remove what a failed test left on the engine."""
        for item in self.left_over():
            kind, _, name = item.partition(" ")
            if kind == "container":
                self.engine.remove_container(name, force=True, v=True)
        for item in self.left_over():
            self.engine.remove_volume(item.partition(" ")[2], force=True)

    async def _spawn(self, name: str, command: str, options: list[str]) -> None:
        log = (self.folder / f"{name}.log").open("ab")
        with log:
            self._running[name] = await asyncio.create_subprocess_exec(
                Path(sys.executable).with_name(command), "serve", *options, stdout=asyncio.subprocess.PIPE, stderr=log
            )

    async def _line(self, name: str) -> str:
        stdout = self._running[name].stdout
        assert stdout is not None
        line = await asyncio.wait_for(stdout.readline(), PATIENCE_SECONDS)
        assert line, self.log_of(name)
        return line.decode().rstrip("\n")


@contextlib.asynccontextmanager
async def running_stack(docker_host: str, engine: APIClient, images: dict[str, str]) -> AsyncIterator[Stack]:
    """Both processes running; what a deleted sandbox leaves behind fails the test."""
    # Not pytest's folder: the path of a Unix socket must be short.
    with tempfile.TemporaryDirectory(prefix="stack-") as folder:
        running = Stack(Path(folder), docker_host, engine, images)
        try:
            await running.start()
            yield running
        finally:
            await running.close()
            left = running.left_over()
            running.clear()
            driver_log = running.log_of("driver")
        assert left == [], f"{left} left; the driver's log:\n{driver_log}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
