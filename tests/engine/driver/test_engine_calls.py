"""The README's table of what each RPC asks of the engine, compared with what is really asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from scripted.compute_gateway import ComputeGateway, launch_authentication

from devtools.driver_reference import RPC_CALLS
from driver_docker.engine_docker import DockerEngine
from driver_docker.metered_engine import CALLS
from driver_docker.serve import Driver
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from scripted.driver_bench import DriverBench


class Recorder:
    """An engine that notes which of its calls are made."""

    def __init__(self, engine: DockerEngine) -> None:
        self._engine = engine
        self.asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name in CALLS:
            self.asked.add(name)
        return getattr(self._engine, name)

    def take(self) -> set[str]:
        """What was asked since the last time."""
        asked, self.asked = self.asked, set()
        return asked


def assert_documented(rpc: str, asked: set[str]) -> None:
    always, sometimes = (set(calls) for calls in RPC_CALLS[rpc])
    assert always <= asked, f"{rpc} did not call {sorted(always - asked)}"
    assert asked <= always | sometimes, f"{rpc} also called {sorted(asked - always - sometimes)}"


async def test_each_rpc_asks_what_is_documented(bench: DriverBench) -> None:
    config = bench.config()
    async with await DockerEngine.connect(bench.docker_host) as engine:
        recorder: Any = Recorder(engine)
        async with Driver(config, recorder) as driver, ComputeGateway(f"unix:{config.bind_socket}") as link:
            stub = link.stub
            first, wanted = bench.sandbox("first"), bench.sandbox("second")
            await bench.launch(link, first)  # warms what is done once an image
            recorder.take()

            async def told(rpc: str, request: Any) -> None:
                await getattr(stub, rpc)(request)
                assert_documented(rpc, recorder.take())

            await told("EnsureWorkspace", pb.EnsureWorkspaceRequest(workspace="default"))
            await told("DeleteWorkspace", pb.DeleteWorkspaceRequest(workspace="default"))
            await told("ValidateSandboxCreate", pb.ValidateSandboxCreateRequest(sandbox=wanted))
            await stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted))
            await link.wait_ready(wanted.id)
            assert_documented("CreateSandbox", recorder.take())
            await told("GetSandbox", pb.GetSandboxRequest(sandbox_id=wanted.id))
            await told("ListSandboxes", pb.ListSandboxesRequest())
            await told("StopSandbox", pb.StopSandboxRequest(sandbox_id=wanted.id))
            started = len(link.events)
            await stub.StartSandbox(
                pb.StartSandboxRequest(
                    sandbox_id=wanted.id,
                    generation_id="g-2",
                    launch_authentication=launch_authentication(generation="g-2").to_json(),
                )
            )
            del link.events[:started]
            await link.wait_reason(wanted.id, "BackendReady")
            assert_documented("StartSandbox", recorder.take())
            await told("DeleteSandbox", pb.DeleteSandboxRequest(sandbox_id=wanted.id))
            await told("DeleteSandbox", pb.DeleteSandboxRequest(sandbox_id=first.id))
            assert not len(driver.services.table)


@pytest.mark.parametrize("rpc", ["GetCapabilities", "AuthenticateSandbox", "WatchSandboxes"])
def test_the_others_ask_nothing(rpc: str) -> None:
    assert RPC_CALLS[rpc] == ((), ())
