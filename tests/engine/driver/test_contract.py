"""The contract's exact answers, and what keeps a launch from beginning, over the socket on the real engine."""

from __future__ import annotations

import io
import tarfile
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from scripted import driver_process
from scripted.compute_gateway import ComputeGateway, launch_authentication, peer, ready
from scripted.engine_proxy import EngineProxy, Road

from driver_docker.engine import EngineAbsentError
from openshell.isolation.documents import BoundaryLaunch, IsolationBackends, UnixTransport
from openshell.isolation.tls import issue_session_tls
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator
    from pathlib import Path

    from docker import APIClient
    from scripted.driver_bench import DriverBench

    from driver_docker.engine import Engine
    from driver_docker.engine_objects import ImageFacts

VERSION_LABEL = "org.opencontainers.image.version"
ABSENT = "7a0f1c2e-0000-4000-8000-00000000dead"


async def _refusal(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value.code(), refused.value.details() or ""


async def _hello(link: ComputeGateway, version: str) -> None:
    await link.stub.GetCapabilities(pb.GetCapabilitiesRequest(gateway=peer(implementation_version=version)))


async def test_field_report_25_the_exact_status_of_every_answer_about_what_is_not_there(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        stub = link.stub
        assert not (await stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=ABSENT, name="nobody"))).deleted
        for call in (
            stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=ABSENT, name="nobody")),
            stub.StopSandbox(pb.StopSandboxRequest(sandbox_id=ABSENT, name="nobody")),
            stub.StartSandbox(pb.StartSandboxRequest(sandbox_id=ABSENT, name="nobody", generation_id="g-2")),
        ):
            assert (await _refusal(call))[0] is grpc.StatusCode.NOT_FOUND
        for call in (
            stub.GetSandbox(pb.GetSandboxRequest()),
            stub.ValidateSandboxCreate(pb.ValidateSandboxCreateRequest()),
            stub.CreateSandbox(pb.CreateSandboxRequest()),
            stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=pb.DriverSandbox(id=ABSENT, name="n"))),
        ):
            assert (await _refusal(call))[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert list((await stub.ListSandboxes(pb.ListSandboxesRequest())).sandboxes) == []


async def test_field_report_25_a_create_is_refused_with_the_contracts_status(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        bare = bench.sandbox()
        bare.spec.launch_authentication = b""
        code, text = await _refusal(link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=bare)))
        assert (code, "launch_authentication" in text) == (grpc.StatusCode.FAILED_PRECONDITION, True)
        await link.stub.ValidateSandboxCreate(pb.ValidateSandboxCreateRequest(sandbox=bare))
        reserving = bench.sandbox()
        reserving.spec.template.resources.cpu_request = "1"
        code, _ = await _refusal(link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=reserving)))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        code, _ = await _refusal(link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted)))
        assert code is grpc.StatusCode.ALREADY_EXISTS
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


@contextmanager
def _derived(client: APIClient, base: str, tag: str, *, changes: list[str], file: str = "") -> Iterator[str]:
    """An image made from another: labels are kept unless `changes` sets them, and a file may be added."""
    container = client.create_container(base, command=["/none"])["Id"]
    try:
        if file:
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w") as archive:
                header = tarfile.TarInfo(file)
                header.size = 2
                archive.addfile(header, io.BytesIO(b"CA"))
            client.put_archive(container, "/", buffer.getvalue())
        repository = base.rpartition(":")[0]
        client.commit(container, repository=repository, tag=tag, changes=changes)
    finally:
        client.remove_container(container)
    try:
        yield f"{repository}:{tag}"
    finally:
        client.remove_image(f"{repository}:{tag}", force=True)


async def test_revisions_that_do_not_fit_are_refused_before_anything_is_created(bench: DriverBench) -> None:
    older = [f"LABEL {VERSION_LABEL}=0.0.117-dev.158"]
    with (
        _derived(bench.client, bench.images.supervisor, f"s-{bench.namespace}", changes=older) as supervisor,
        _derived(bench.client, bench.images.runtime, f"r-{bench.namespace}", changes=older) as runtime,
    ):
        images: dict[str, Any] = {"supervisor_image": supervisor, "sandbox_runtime_image": runtime}
        async with bench.running(**images) as (_, link):
            await _hello(link, "0.0.117-dev.160")
            wanted = bench.sandbox()
            for call in (
                link.stub.ValidateSandboxCreate(pb.ValidateSandboxCreateRequest(sandbox=wanted)),
                link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted)),
            ):
                code, text = await _refusal(call)
                assert code is grpc.StatusCode.FAILED_PRECONDITION
                for words in (
                    "gateway 0.0.117-dev.160 (handshake of openshell/gateway)",
                    "supervisor image 0.0.117-dev.158 (label",
                    "sandbox runtime image 0.0.117-dev.158 (label",
                    "supervisor_image and sandbox_runtime_image of revision 0.0.117-dev.160",
                    "a gateway of revision 0.0.117-dev.158",
                ):
                    assert words in text
            assert bench.sandbox_left_over(wanted.id) == []
            assert list((await link.stub.ListSandboxes(pb.ListSandboxesRequest())).sandboxes) == []
            await _hello(link, "0.0.117-dev.158+g9c41f057c")
            await link.stub.ValidateSandboxCreate(pb.ValidateSandboxCreateRequest(sandbox=wanted))
        async with bench.running(**images, compatibility="warn") as (_, link):
            await _hello(link, "0.0.117-dev.160")
            wanted = bench.sandbox()
            assert ready(await bench.launch(link, wanted)).status == "True"
            await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_a_derivative_with_labels_kept_and_an_image_pinned_by_its_id_are_launched(bench: DriverBench) -> None:
    with (
        _derived(
            bench.client, bench.images.supervisor, f"ca-{bench.namespace}", changes=[], file="etc/private-ca.pem"
        ) as supervisor,
    ):
        pinned = bench.client.inspect_image(bench.images.runtime)["Id"]  # type: ignore[no-untyped-call]
        async with bench.running(supervisor_image=supervisor, sandbox_runtime_image=pinned) as (driver, link):
            await _hello(link, "0.1.5")
            wanted = bench.sandbox()
            assert ready(await bench.launch(link, wanted)).status == "True"
            record = driver.services.table.find(sandbox_id=wanted.id, name="").record
            assert (record.runtime_image_id, record.isolation_backend) == (pinned, "openshell-sandbox")
            await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_an_unlabelled_image_without_a_version_tag_is_refused_with_the_cure(bench: DriverBench) -> None:
    async with bench.running(supervisor_image=bench.images.bare) as (_, link):
        await _hello(link, "0.1.5")
        code, text = await _refusal(
            link.stub.ValidateSandboxCreate(pb.ValidateSandboxCreateRequest(sandbox=bench.sandbox()))
        )
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "supervisor image of unknown revision" in text
        assert "compatibility = 'warn'" in text


def _backend(folder: Path, **changes: Any) -> dict[str, Any]:
    anchor = folder / "ca.pem"
    anchor.write_text(issue_session_tls("5f0c7f5e-0000-4000-8000-000000000001").trust_anchor_pem)
    endpoint = {"kind": "unix", "socket_path": str(folder / "run" / "backend.sock")} | changes
    return {
        "isolation_backend": "acme",
        "isolation_backends": {"acme": {"server_name": "backend.acme", "trust_anchor": str(anchor), **endpoint}},
    }


def _file(client: APIClient, container: str, path: str) -> bytes:
    chunks, _ = client.get_archive(container, path)
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
        stream = archive.extractfile(archive.getmembers()[0])
        return stream.read() if stream else b""


async def test_a_registered_backend_is_placed_for_the_supervisor_and_pinned(bench: DriverBench, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "backend.sock").touch()
    async with bench.running(**_backend(tmp_path)) as (driver, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        supervisor = bench.container(wanted.id, "supervisor")
        assert "OPENSHELL_ADMITTED_ISOLATION_BACKEND=acme" in supervisor["Config"]["Env"]
        assert supervisor["Config"]["Labels"]["openshell.ai/isolation-backend"] == "acme"
        listing = bench.client.exec_create(supervisor["Id"], ["/bin/cat", "/.openshell/isolation-backend/backend.sock"])
        assert bench.client.exec_start(listing["Id"]) == b""
        assert bench.client.exec_inspect(listing["Id"])["ExitCode"] == 0
        launch = BoundaryLaunch.from_json(
            _file(bench.client, supervisor["Id"], "/.openshell/supervisor/boundary-launch.json")
        )
        assert (launch.backend_name, launch.sandbox_id) == ("acme", wanted.id)
        assert launch.resource_claims["docker.container_id"] == bench.container(wanted.id, "sandbox")["Id"]
        backends = IsolationBackends.from_json(
            _file(bench.client, supervisor["Id"], "/.openshell/supervisor/isolation-backends.json")
        )
        assert backends.backends[0].endpoint == UnixTransport(socket_path="/.openshell/isolation-backend/backend.sock")
        record = driver.services.table.find(sandbox_id=wanted.id, name="").record
        assert record.isolation_backend == "acme"
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))
        await link.wait_deleted(wanted.id)


async def test_a_backend_that_cannot_be_placed_is_refused_before_anything_is_created(
    bench: DriverBench, tmp_path: Path
) -> None:
    async with bench.running(**_backend(tmp_path)) as (_, link):
        wanted = bench.sandbox()
        code, text = await _refusal(link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted)))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "isolation backend acme cannot be placed" in text
        assert bench.sandbox_left_over(wanted.id) == []


def _start(sandbox_id: str, generation: str) -> pb.StartSandboxRequest:
    return pb.StartSandboxRequest(
        sandbox_id=sandbox_id,
        generation_id=generation,
        launch_authentication=launch_authentication(generation=generation).to_json(),
    )


async def _stopped(bench: DriverBench, **changes: Any) -> str:
    """A sandbox that was launched and stopped by a driver that has ended since."""
    async with bench.running(**changes) as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        await link.stub.StopSandbox(pb.StopSandboxRequest(sandbox_id=wanted.id))
    return wanted.id


async def _delete(link: ComputeGateway, sandbox_id: str) -> None:
    await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=sandbox_id))
    await link.wait_deleted(sandbox_id)


async def test_a_sandbox_is_not_started_under_another_backend_and_is_once_the_selection_is_restored(
    bench: DriverBench, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    sandbox_id = await _stopped(bench)
    async with bench.running(**_backend(tmp_path)) as (_, link):
        code, text = await _refusal(link.stub.StartSandbox(_start(sandbox_id, "g-2")))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert text == (
            "sandbox isolation backend 'openshell-sandbox' does not match gateway selection 'acme'; "
            "restore the gateway selection or create a new sandbox"
        )
        assert bench.container(sandbox_id, "sandbox")["State"]["Status"] == "exited"
    async with bench.running() as (_, link):
        await link.stub.StartSandbox(_start(sandbox_id, "g-2"))
        await link.wait_reason(sandbox_id, "BackendReady")
        await _delete(link, sandbox_id)


async def test_a_sandbox_of_a_registered_backend_is_started_with_its_endpoint_as_it_is_now(
    bench: DriverBench, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    sandbox_id = await _stopped(bench, **_backend(tmp_path))
    (tmp_path / "moved").mkdir()
    moved = _backend(tmp_path, socket_path=str(tmp_path / "moved" / "other.sock"))
    async with bench.running(**moved) as (_, link):
        await link.stub.StartSandbox(_start(sandbox_id, "g-2"))
        await link.wait_reason(sandbox_id, "BackendReady")
        supervisor = bench.container(sandbox_id, "supervisor")
        backends = IsolationBackends.from_json(
            _file(bench.client, supervisor["Id"], "/.openshell/supervisor/isolation-backends.json")
        )
        assert backends.backends[0].endpoint == UnixTransport(socket_path="/.openshell/isolation-backend/other.sock")
        launch = BoundaryLaunch.from_json(
            _file(bench.client, supervisor["Id"], "/.openshell/supervisor/boundary-launch.json")
        )
        assert launch.generation == "g-2"
        await _delete(link, sandbox_id)


async def test_a_start_is_refused_when_gateway_and_images_were_upgraded_apart(bench: DriverBench) -> None:
    sandbox_id = await _stopped(bench)
    newer = [f"LABEL {VERSION_LABEL}=0.1.6"]
    with _derived(bench.client, bench.images.supervisor, f"n-{bench.namespace}", changes=newer) as supervisor:
        async with bench.running(supervisor_image=supervisor) as (_, link):
            await _hello(link, "0.1.6")
            code, text = await _refusal(link.stub.StartSandbox(_start(sandbox_id, "g-2")))
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert "supervisor image 0.1.6" in text
            assert "sandbox runtime image 0.1.5" in text
            assert "kept since the sandbox was created" in text
            assert bench.container(sandbox_id, "sandbox")["State"]["Status"] == "exited"
    async with bench.running() as (_, link):
        await _hello(link, "0.1.5")
        await link.stub.StartSandbox(_start(sandbox_id, "g-2"))
        await link.wait_reason(sandbox_id, "BackendReady")
        await _delete(link, sandbox_id)


class _NotPulledYet:
    """The real engine, on which one image appears only once it is pulled."""

    def __init__(self, engine: Engine, reference: str) -> None:
        self._engine = engine
        self._reference = reference
        self._pulled = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def inspect_image(self, reference: str) -> ImageFacts:
        if reference == self._reference and not self._pulled:
            raise EngineAbsentError(f"no such image: {reference}")
        return await self._engine.inspect_image(reference)

    async def pull_image(self, *_: Any, **__: Any) -> None:
        self._pulled = True


async def test_an_image_that_was_pulled_for_a_launch_is_judged_before_anything_is_created(bench: DriverBench) -> None:
    older = [f"LABEL {VERSION_LABEL}=0.1.4"]
    with _derived(bench.client, bench.images.supervisor, f"p-{bench.namespace}", changes=older) as supervisor:
        async with bench.running(
            wrap=lambda engine: _NotPulledYet(engine, supervisor), supervisor_image=supervisor
        ) as (_, link):
            await _hello(link, "0.1.5")
            wanted = bench.sandbox()
            failed = ready(await bench.launch(link, wanted))
            assert (failed.status, failed.reason) == ("False", "ControlSupervisorStartFailed")
            assert "supervisor image 0.1.4" in failed.message
            assert [event.reason for event in link.platform_events(wanted.id) if event.reason == "Created"] == []
            assert bench.sandbox_left_over(wanted.id) == []
            await _delete(link, wanted.id)


async def test_a_handshake_is_answered_with_the_same_bytes_while_the_engine_is_away_and_after_a_restart(
    bench: DriverBench,
) -> None:
    request = pb.GetCapabilitiesRequest(gateway=peer())
    answers = set()
    for _ in range(2):
        async with (
            EngineProxy.between(bench.folder / "e.sock", bench.docker_host) as proxy,
            driver_process.serving(bench, **{"docker-socket": str(proxy.path)}) as process,
            ComputeGateway(f"unix:{driver_process.socket_of(bench)}") as link,
        ):
            answers.add((await link.stub.GetCapabilities(request)).SerializeToString(deterministic=True))
            await proxy.set(Road.SILENT)
            answers.add((await link.stub.GetCapabilities(request)).SerializeToString(deterministic=True))
            await proxy.set(Road.OPEN)
            assert await driver_process.end(process) == 0
    bench.clear()  # a driver whose engine was silent a moment ago may leave its runtime volume to the next one
    assert len(answers) == 1
