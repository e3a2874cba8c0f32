"""Bad input, missing parts, a second driver, an engine that is not there: a clear error, and nothing left behind."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from scripted import driver_process
from scripted.compute_gateway import ComputeGateway, peer, ready

from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

    from scripted.driver_bench import DriverBench


async def _refusal(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    text = refused.value.details() or ""
    assert text
    assert len(text.encode()) <= 1024
    assert text.isprintable()
    return refused.value.code(), text


async def test_wrong_requests_are_refused_with_the_right_code_and_leave_nothing(bench: DriverBench) -> None:
    async with bench.running() as (driver, link):
        stub, code = link.stub, grpc.StatusCode
        create, validate = stub.CreateSandbox, stub.ValidateSandboxCreate

        def changed(**fields: Any) -> pb.DriverSandbox:
            made = bench.sandbox()
            for name, value in fields.items():
                setattr(made, name, value)
            return made

        bare = bench.sandbox()
        bare.spec.ClearField("launch_authentication")
        garbled = bench.sandbox()
        garbled.spec.launch_authentication = b'{"supervisor": {"gateway_token": "s3cr3t-value"}}'
        unlimited = bench.sandbox()
        unlimited.spec.template.resources.memory_request = "1Gi"
        configured = bench.sandbox()
        configured.spec.template.driver_config.update({"mounts": []})
        no_template = bench.sandbox()
        no_template.spec.ClearField("template")
        gpu = bench.sandbox()
        gpu.spec.resource_requirements.gpu.count = 0
        cases = [
            (create(pb.CreateSandboxRequest()), code.INVALID_ARGUMENT, "sandbox is missing"),
            (create(pb.CreateSandboxRequest(sandbox=pb.DriverSandbox(id="a"))), code.INVALID_ARGUMENT, "spec"),
            (create(pb.CreateSandboxRequest(sandbox=no_template)), code.INVALID_ARGUMENT, "template"),
            (create(pb.CreateSandboxRequest(sandbox=changed(id=""))), code.INVALID_ARGUMENT, "sandbox.id"),
            (create(pb.CreateSandboxRequest(sandbox=changed(id="../../etc"))), code.INVALID_ARGUMENT, "sandbox.id"),
            (create(pb.CreateSandboxRequest(sandbox=changed(name=""))), code.INVALID_ARGUMENT, "sandbox.name"),
            (create(pb.CreateSandboxRequest(sandbox=bare)), code.FAILED_PRECONDITION, "launch_authentication"),
            (create(pb.CreateSandboxRequest(sandbox=garbled)), code.INVALID_ARGUMENT, "launch_authentication"),
            (validate(pb.ValidateSandboxCreateRequest(sandbox=unlimited)), code.FAILED_PRECONDITION, "memory_request"),
            (validate(pb.ValidateSandboxCreateRequest(sandbox=configured)), code.FAILED_PRECONDITION, "driver_config"),
            (validate(pb.ValidateSandboxCreateRequest(sandbox=gpu)), code.INVALID_ARGUMENT, "gpu"),
            (stub.GetSandbox(pb.GetSandboxRequest()), code.INVALID_ARGUMENT, "empty"),
            (stub.GetSandbox(pb.GetSandboxRequest(sandbox_id="nobody")), code.NOT_FOUND, "nobody"),
            (stub.StopSandbox(pb.StopSandboxRequest(sandbox_id="nobody")), code.NOT_FOUND, "nobody"),
            (stub.StopSandbox(pb.StopSandboxRequest()), code.INVALID_ARGUMENT, "empty"),
            (stub.StartSandbox(pb.StartSandboxRequest(sandbox_id="nobody")), code.NOT_FOUND, "nobody"),
            (stub.DeleteSandbox(pb.DeleteSandboxRequest()), code.INVALID_ARGUMENT, "empty"),
            (stub.AuthenticateSandbox(pb.AuthenticateSandboxRequest()), code.UNIMPLEMENTED, "authentication"),
            (stub.GetCapabilities(pb.GetCapabilitiesRequest()), code.FAILED_PRECONDITION, "metadata"),
            (
                stub.GetCapabilities(pb.GetCapabilitiesRequest(gateway=peer(required_capabilities=["openshell.a.b"]))),
                code.FAILED_PRECONDITION,
                "openshell.a.b",
            ),
        ]
        for call, expected, word in cases:
            got, text = await _refusal(call)
            assert (got, word in text) == (expected, True), text
            assert "s3cr3t" not in text
        await validate(pb.ValidateSandboxCreateRequest(sandbox=bare))
        assert not (await stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id="nobody"))).deleted
        await stub.EnsureWorkspace(pb.EnsureWorkspaceRequest(workspace="w"))
        await stub.DeleteWorkspace(pb.DeleteWorkspaceRequest(workspace="w"))
        assert len(driver.services.table) == 0
        assert link.events == []


@pytest.mark.parametrize(
    "sandbox_id",
    [".", "..", "../other", "a/b", "a/../b", "sb\0", "x" * 300, "exits.jsonl", ".lock", ".driver-owner", "/outside"],
)
async def test_an_id_with_a_path_in_it_is_unknown_to_every_rpc_and_touches_no_folder(
    bench: DriverBench, tmp_path: Path, sandbox_id: str
) -> None:
    async with bench.running() as (driver, link):
        namespace = driver.services.store.directory
        other, outside = namespace.parent / "other" / "record", tmp_path / "outside" / "file"
        for file in (other, outside):
            file.parent.mkdir()
            file.write_text("kept")
        (namespace / "sb-1").mkdir()
        before = sorted(namespace.parent.rglob("*"))
        asked = str(outside.parent) if sandbox_id == "/outside" else sandbox_id
        stub = link.stub
        for call in (
            stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=asked, name="nobody")),
            stub.StopSandbox(pb.StopSandboxRequest(sandbox_id=asked, name="nobody")),
            stub.StartSandbox(pb.StartSandboxRequest(sandbox_id=asked, name="nobody")),
        ):
            assert (await _refusal(call))[0] is grpc.StatusCode.NOT_FOUND
        assert not (await stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=asked, name="nobody"))).deleted
        wanted = bench.sandbox()
        wanted.id = asked
        code, text = await _refusal(stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted)))
        assert (code, "sandbox.id" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        assert sorted(namespace.parent.rglob("*")) == before
        assert outside.read_text() == "kept"
        assert link.events == []


async def test_a_second_create_of_an_id_is_refused_and_harms_nothing(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        code, _ = await _refusal(link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted)))
        assert code is grpc.StatusCode.ALREADY_EXISTS
        assert bench.container(wanted.id, "supervisor")["State"]["Running"]
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_an_image_that_must_not_be_pulled_is_refused_before_anything_is_made(bench: DriverBench) -> None:
    async with bench.running(image_pull_policy="never") as (_, link):
        wanted = bench.sandbox(image="openshell-stub/none:1")
        for call in (
            link.stub.ValidateSandboxCreate(pb.ValidateSandboxCreateRequest(sandbox=wanted)),
            link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted)),
        ):
            code, text = await _refusal(call)
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert "openshell-stub/none:1" in text


async def test_an_image_that_cannot_be_pulled_is_a_remembered_failure(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox(image="127.0.0.1:1/none:1")
        observed = await bench.launch(link, wanted)
        assert ready(observed).reason == "ImagePullFailed"
        assert "127.0.0.1:1/none:1" in ready(observed).message
        assert [event.reason for event in link.platform_events(wanted.id)][:2] == ["Scheduled", "Pulling"]
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_a_supervisor_image_without_its_binary_is_named(bench: DriverBench) -> None:
    async with bench.running(supervisor_image=bench.images.bare, compatibility="warn") as (_, link):
        wanted = bench.sandbox()
        observed = await bench.launch(link, wanted)
        assert ready(observed).reason == "ControlSupervisorStartFailed"
        assert "/openshell-supervisor" in ready(observed).message
        assert "127" in ready(observed).message
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_a_runtime_image_without_its_binary_is_named(bench: DriverBench) -> None:
    async with bench.running(sandbox_runtime_image=bench.images.bare, compatibility="warn") as (_, link):
        wanted = bench.sandbox()
        observed = await bench.launch(link, wanted)
        assert "/.openshell/runtime/openshell-sandbox" in ready(observed).message
        assert bench.images.bare in ready(observed).message
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_a_user_that_the_image_does_not_have_is_named(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox()
        wanted.spec.workload_identity.user = "nobody-here"
        observed = await bench.launch(link, wanted)
        assert ready(observed).reason == "IdentityResolutionFailed"
        assert "nobody-here" in ready(observed).message
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_a_name_taken_by_a_foreign_container_is_an_error_and_the_foreigner_stays(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox()
        name = f"openshell-default--steady-{wanted.id}"
        foreign = bench.client.create_container(bench.images.workload, "/bin/sh", name=name)["Id"]
        observed = await bench.launch(link, wanted)
        assert ready(observed).reason == "ContainerCreateFailed"
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))
        assert bench.client.inspect_container(foreign)["Name"] == f"/{name}"
        bench.client.remove_container(foreign)


async def test_a_container_removed_from_outside_is_told_as_removed(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        bench.client.remove_container(bench.container(wanted.id, "sandbox")["Id"], force=True)
        observed = await link.wait_reason(wanted.id, "ContainerExited")
        assert "removed" in ready(observed).message
        assert "Deleted" not in {event.WhichOneof("payload") for _, event in link.events}
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_a_second_driver_is_refused_and_the_first_goes_on(bench: DriverBench) -> None:
    async with driver_process.serving(bench) as process:
        code, out, err = await driver_process.run(driver_process.flags(bench))
        assert (code, out) == (2, "")
        assert "another driver is serving" in err
        other = str(bench.folder / "o" / "d.sock")
        code, _, err = await driver_process.run(driver_process.flags(bench, **{"bind-socket": other}))
        assert code == 2
        assert "another driver uses the state folder" in err
        async with ComputeGateway(f"unix:{driver_process.socket_of(bench)}") as link:
            await link.stub.GetCapabilities(pb.GetCapabilitiesRequest(gateway=peer()))
        assert await driver_process.end(process) == 0


async def test_a_socket_that_somebody_else_serves_is_not_stolen(bench: DriverBench) -> None:
    path = driver_process.socket_of(bench)
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        code, _, err = await driver_process.run(driver_process.flags(bench))
        assert code == 2
        assert "another process is listening" in err
    assert path.exists()
    async with driver_process.serving(bench) as process:  # nobody listens there any more: a stale file
        assert await driver_process.end(process) == 0
    assert not path.exists()


async def test_an_engine_that_is_not_there_is_an_error_that_names_the_place(bench: DriverBench) -> None:
    arguments = driver_process.flags(bench, **{"docker-socket": "/nonexistent/docker.sock"})
    code, out, err = await driver_process.run(arguments)
    assert (code, out) == (1, "")
    assert "/nonexistent/docker.sock" in err
    assert "Traceback" not in err
    assert not (bench.folder / "state").exists()


async def test_a_socket_path_of_108_bytes_is_refused(bench: DriverBench) -> None:
    path = str(bench.folder) + "/" + "x" * (108 - len(str(bench.folder)) - 1)
    assert len(path) == 108
    code, _, err = await driver_process.run(driver_process.flags(bench, **{"bind-socket": path}))
    assert code == 2
    assert "108" in err
    assert "107" in err


async def test_five_hundred_watches_leave_no_reader_behind(bench: DriverBench) -> None:
    async with bench.running() as (driver, link):
        before = driver.hub.reader_count
        for _ in range(10):
            calls = [link.stub.WatchSandboxes(pb.WatchSandboxesRequest()) for _ in range(50)]
            for call in calls:
                await call.wait_for_connection()
                call.cancel()
        async with asyncio.timeout(10):
            while driver.hub.reader_count > before:  # noqa: ASYNC110 - the server learns of a cancel by itself
                await asyncio.sleep(0.02)
