"""Launch, loss, stop and delete over the socket, on the real engine."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from scripted.compute_gateway import SECRET, peer, ready
from scripted.inside import entry_of, launch_over

from openshell.isolation.documents import BoundaryBootstrap, MainProcessSpec, OuterFence, RuntimeDescriptor
from openshell.verdicts import KilledBy, Verdict, VerdictKind
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from docker import APIClient
    from scripted.driver_bench import DriverBench


def _read(client: APIClient, container: str, path: str) -> tuple[tarfile.TarInfo, bytes]:
    chunks, _ = client.get_archive(container, path)
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
        member = archive.getmembers()[0]
        stream = archive.extractfile(member)
        return member, stream.read() if stream else b""


async def test_a_created_sandbox_is_told_as_starting_then_ready(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox("steady one")
        observed = await bench.launch(link, wanted)

        assert (ready(observed).status, ready(observed).reason) == ("True", "BackendReady")
        assert (observed.id, observed.name, observed.workspace) == (wanted.id, "steady one", "default")
        assert observed.namespace == bench.namespace
        assert not observed.HasField("spec")
        assert observed.status.instance_id == bench.container(wanted.id, "sandbox")["Id"]
        assert [event.reason for event in link.platform_events(wanted.id)] == [
            "Scheduled",
            "ImagePresent",
            "Created",
            "Started",
        ]
        told = [
            ready(event.sandbox.sandbox).reason for _, event in link.events if event.WhichOneof("payload") == "sandbox"
        ]
        assert told == ["Starting", "BackendReady"]
        got = await link.stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=wanted.id))
        assert got.sandbox == observed
        listed = await link.stub.ListSandboxes(pb.ListSandboxesRequest())
        assert list(listed.sandboxes) == [observed]
        deleted = await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))
        assert deleted.deleted
        await link.wait_deleted(wanted.id)


async def test_the_engine_really_has_what_the_contract_says(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox("steady", labels={"team": "a", "openshell.ai/sandbox-id": "forged"})
        wanted.spec.environment.update({"MINE": "1", "OPENSHELL_SANDBOX_TOKEN": "x"})
        wanted.spec.command.extend(["/bin/true", "two words"])
        wanted.spec.template.resources.cpu_limit = "500m"
        wanted.spec.template.resources.memory_limit = "64Mi"
        await bench.launch(link, wanted)
        workload = bench.container(wanted.id, "sandbox")
        supervisor = bench.container(wanted.id, "supervisor")

        host, config = workload["HostConfig"], workload["Config"]
        assert config["User"] == "1200:1300"
        assert host["GroupAdd"] == ["1400"]
        assert config["Entrypoint"] == ["/.openshell/runtime/openshell-sandbox"]
        assert config["Cmd"] == ["--bootstrap", "/.openshell/channel/sandbox/bootstrap.json"]
        assert (host["NetworkMode"], list(workload["NetworkSettings"]["Networks"])) == ("none", ["none"])
        assert (host["NanoCpus"], host["Memory"], host["PidsLimit"]) == (500_000_000, 64 * 2**20, 2048)
        assert (host["CapDrop"], host["CapAdd"]) == (["ALL"], None)
        assert host["SecurityOpt"] == ["no-new-privileges:true"]
        assert host["Sysctls"] == {"net.ipv4.ip_unprivileged_port_start": "0"}
        assert host["LogConfig"]["Type"] == "json-file"
        assert host["RestartPolicy"]["Name"] == "no"
        assert config["Labels"]["team"] == "a"
        assert config["Labels"]["openshell.ai/sandbox-id"] == wanted.id
        mounts = {mount["Destination"]: mount["RW"] for mount in workload["Mounts"]}
        assert mounts == {"/.openshell/channel": True, "/.openshell/runtime": False}

        host, config = supervisor["HostConfig"], supervisor["Config"]
        assert (config["User"], host["NetworkMode"], host["ReadonlyRootfs"]) == ("65534:65534", "host", True)
        assert host["ExtraHosts"] == ["host.openshell.internal:127.0.0.1", "host.docker.internal:127.0.0.1"]
        assert {m["Destination"]: m["RW"] for m in supervisor["Mounts"]}["/.openshell/channel"] is False
        environment = dict(entry.split("=", 1) for entry in config["Env"])
        spec = MainProcessSpec.from_json(environment["OPENSHELL_MAIN_PROCESS_SPEC"])
        assert spec.command == ("/bin/true", "two words")
        assert environment["OPENSHELL_SANDBOX_ID"] == wanted.id

        member, data = _read(bench.client, workload["Id"], "/.openshell/channel/sandbox/bootstrap.json")
        assert (member.uid, member.gid, member.mode & 0o777) == (1200, 1300, 0o600)
        bootstrap = BoundaryBootstrap.from_json(data)
        assert bootstrap.child_env == {"MINE": "1"}
        member, data = _read(bench.client, supervisor["Id"], "/.openshell/supervisor/runtime-descriptor.json")
        assert (member.uid, member.gid, member.mode & 0o777) == (0, 65534, 0o440)
        descriptor = RuntimeDescriptor.from_json(data)
        assert descriptor.resource_claims == bootstrap.resource_claims
        assert descriptor.resource_claims["docker.container_id"] == workload["Id"]
        assert descriptor.outer_fence == bootstrap.outer_fence
        assert isinstance(descriptor.outer_fence, OuterFence)
        member, data = _read(bench.client, workload["Id"], "/.openshell/channel/sandbox")
        assert (member.uid, member.mode & 0o777) == (1200, 0o711)
        member, _ = _read(bench.client, workload["Id"], "/sandbox")
        assert (member.uid, member.gid, member.mode & 0o777) == (1200, 1300, 0o700)
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_a_supervisor_killed_from_outside_is_judged_and_the_workload_stopped(bench: DriverBench) -> None:
    async with bench.running() as (driver, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        workload = bench.container(wanted.id, "sandbox")
        bench.client.kill(bench.container(wanted.id, "supervisor")["Id"], "SIGKILL")

        observed = await link.wait_reason(wanted.id, "ControlSupervisorExited")
        assert ready(observed).status == "False"
        assert "137" in ready(observed).message
        assert "SIGKILL" in ready(observed).message
        _, event = await link.wait(lambda e: e.platform_event.event.reason == "ControlSupervisorExited")
        told = event.platform_event.event
        assert told.type == "Warning"
        verdict = Verdict.from_metadata(told.metadata)
        assert verdict is not None
        assert (verdict.kind, verdict.exit_code) == (VerdictKind.KILLED_THROUGH_ENGINE, 137)
        assert (verdict.killed_by, verdict.generation) == (KilledBy.ENGINE_CLIENT, "g-1")
        assert ready(observed).transition_time.ToDatetime() == verdict.finished_at.replace(tzinfo=None)  # type: ignore[union-attr]
        await asyncio.to_thread(bench.client.wait, workload["Id"], timeout=20)
        exits = driver.services.store.exits(wanted.id)
        assert exits[-1]["verdict"]["openshell.verdict.kind"] == "killed_through_engine"
        got = await link.stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=wanted.id))
        assert ready(got.sandbox).reason == "ControlSupervisorExited"
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


@pytest.mark.parametrize(("code", "kind"), [(5, VerdictKind.EXITED), (0, VerdictKind.ENDED_UNASKED)])
async def test_a_supervisor_that_exits_by_itself_is_quoted(bench: DriverBench, code: int, kind: VerdictKind) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox(f"late-{code}.x")
        await bench.launch(link, wanted)
        bench.client.kill(bench.container(wanted.id, "supervisor")["Id"], "SIGUSR1")
        observed = await link.wait_reason(wanted.id, "ControlSupervisorExited")
        assert "gateway not reachable" in ready(observed).message
        _, event = await link.wait(lambda e: e.platform_event.event.reason == "ControlSupervisorExited")
        verdict = Verdict.from_metadata(event.platform_event.event.metadata) or pytest.fail("no verdict")
        assert (verdict.kind, verdict.exit_code) == (kind, code)
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_words_are_kept_back_where_the_operator_says_so(bench: DriverBench) -> None:
    async with bench.running(public_detail="none") as (_, link):
        wanted = bench.sandbox("exit-9.x")
        observed = await bench.launch(link, wanted)
        assert ready(observed).reason == "ControlSupervisorStartFailed"
        assert "gateway not reachable" not in ready(observed).message
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


@pytest.mark.parametrize("name", ["exit-9.x", "late-6.x"])
async def test_the_verdict_is_told_before_the_terminal_snapshot(bench: DriverBench, name: str) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox(name)
        observed = await bench.launch(link, wanted)
        if name.startswith("late"):
            bench.client.kill(bench.container(wanted.id, "supervisor")["Id"], "SIGUSR1")
            observed = await link.wait_reason(wanted.id, "ControlSupervisorExited")
        terminal = ready(observed).reason
        told = [
            event.platform_event.event.reason or ready(event.sandbox.sandbox).reason
            for _, event in link.events
            if terminal in str(event)
        ]
        kinds = [event.WhichOneof("payload") for _, event in link.events if terminal in str(event)]
        assert kinds == ["platform_event", "sandbox"], told
        assert Verdict.from_metadata(link.platform_events(wanted.id)[-1].metadata) is not None
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


@pytest.mark.parametrize(("code", "reason"), [(9, "ControlSupervisorStartFailed"), (78, "WorkspaceValidationFailed")])
async def test_a_failed_start_is_remembered_and_its_containers_removed(
    bench: DriverBench, code: int, reason: str
) -> None:
    async with bench.running() as (driver, link):
        wanted = bench.sandbox(f"exit-{code}.x")
        observed = await bench.launch(link, wanted)
        assert ready(observed).reason == reason
        assert f"code {code}" in ready(observed).message
        assert "gateway not reachable" in ready(observed).message
        await launch_over(entry_of(driver, wanted.id))
        assert bench.sandbox_left_over(wanted.id) == []
        listed = await link.stub.ListSandboxes(pb.ListSandboxesRequest())
        assert [ready(entry).reason for entry in listed.sandboxes] == [reason]
        again = await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))
        assert again.deleted
        await link.wait_deleted(wanted.id)


async def test_a_workload_that_ends_before_ready_is_named(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox("never")
        wanted.spec.log_level = "exit-3"
        observed = await bench.launch(link, wanted)
        assert ready(observed).reason == "ContainerExited"
        assert "code 3" in ready(observed).message
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_a_workload_that_ends_later_is_told_and_its_supervisor_follows(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        supervisor = bench.container(wanted.id, "supervisor")["Id"]
        bench.client.kill(bench.container(wanted.id, "sandbox")["Id"], "SIGUSR1")
        observed = await link.wait_reason(wanted.id, "ContainerExited")
        assert "code 7" in ready(observed).message
        bench.client.kill(supervisor, "SIGTERM")
        got = await link.stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=wanted.id))
        assert ready(got.sandbox).reason == "ContainerExited"
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))
        reasons = [event.reason for event in link.platform_events(wanted.id)]
        assert "ControlSupervisorExited" not in reasons


async def test_stop_keeps_the_workload_and_is_idempotent(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        for _ in range(2):
            await link.stub.StopSandbox(pb.StopSandboxRequest(sandbox_id=wanted.id))
        assert bench.container(wanted.id, "sandbox")["State"]["Status"] == "exited"
        assert len(bench.sandbox_left_over(wanted.id)) == 3, "workload and its two volumes"
        got = await link.stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=wanted.id))
        conditions = {c.type: (c.status, c.reason) for c in got.sandbox.status.conditions}
        assert conditions == {"Ready": ("False", "ContainerStopped"), "Suspended": ("True", "ContainerStopped")}
        assert "Warning" not in {event.type for event in link.platform_events(wanted.id)}
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_a_paused_workload_is_not_an_error_and_can_be_stopped(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        bench.client.pause(bench.container(wanted.id, "sandbox")["Id"])
        observed = await link.wait_reason(wanted.id, "ContainerPaused")
        assert ready(observed).status == "Unknown"
        await link.stub.StopSandbox(pb.StopSandboxRequest(sandbox_id=wanted.id))
        assert bench.container(wanted.id, "sandbox")["State"]["Status"] == "exited"
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_delete_during_provisioning_leaves_nothing(bench: DriverBench) -> None:
    async with bench.running() as (driver, link):
        wanted = bench.sandbox("never-healthy")
        await link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted))
        await link.wait(lambda e: e.platform_event.event.reason == "Created")
        answers = await asyncio.gather(
            *(link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id)) for _ in range(3))
        )
        assert sorted(answer.deleted for answer in answers) == [False, False, True]
        assert bench.sandbox_left_over(wanted.id) == []
        assert len(driver.services.table) == 0
        gone = await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))
        assert not gone.deleted


async def test_delete_at_every_moment_of_a_launch_leaves_nothing(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        for step in range(8):
            wanted = bench.sandbox()
            await link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted))
            await asyncio.sleep(step * 0.06)
            await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))
            assert bench.sandbox_left_over(wanted.id) == []


async def test_stop_during_provisioning_reports_no_failure(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox("never")
        await link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted))
        await link.wait(lambda e: e.platform_event.event.reason == "Created")
        await link.stub.StopSandbox(pb.StopSandboxRequest(sandbox_id=wanted.id))
        assert "Warning" not in {event.type for event in link.platform_events(wanted.id)}
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_teardown_goes_on_when_the_caller_goes_away(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id), timeout=0.01)
        assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await link.wait_deleted(wanted.id)
        assert bench.sandbox_left_over(wanted.id) == []


async def test_many_creates_at_once_all_become_ready(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = [bench.sandbox(f"steady-{number}") for number in range(6)]
        observed = await asyncio.gather(*(bench.launch(link, sandbox) for sandbox in wanted))
        assert {ready(entry).reason for entry in observed} == {"BackendReady"}
        await asyncio.gather(
            *(link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=entry.id)) for entry in wanted)
        )


async def test_a_watch_opened_later_gets_everything_first(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox()
        observed = await bench.launch(link, wanted)
        late = link.stub.WatchSandboxes(pb.WatchSandboxesRequest())
        assert (await late.read()).sandbox.sandbox == observed
        late.cancel()
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_no_secret_is_in_anything_that_can_be_looked_at(
    bench: DriverBench, capfd: pytest.CaptureFixture[str]
) -> None:
    async with bench.running() as (driver, link):
        failed = bench.sandbox("exit-9.leaky")
        await bench.launch(link, failed)
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        seen = json.dumps([bench.container(wanted.id, role) for role in ("sandbox", "supervisor")])
        seen += "".join(str(event) for _, event in link.events)
        seen += json.dumps(driver.services.store.exits(failed.id))
        for sandbox in (failed, wanted):
            record = driver.services.table.by_id(sandbox.id)
            seen += repr(record)
            await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=sandbox.id))
    out, err = capfd.readouterr()
    assert SECRET not in seen + out + err
    assert "PRIVATE KEY" not in seen + out + err


async def test_state_is_for_its_owner_alone(bench: DriverBench) -> None:
    async with bench.running() as (driver, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        folder = driver.services.store.directory / wanted.id
        assert folder.stat().st_mode & 0o777 == 0o700
        written = [file for file in folder.iterdir() if not file.name.startswith(".")]
        assert {file.stat().st_mode & 0o777 for file in written} == {0o600}
        assert (folder / "supervisor-auth.json").exists()
        assert driver.services.config.bind_socket.stat().st_mode & 0o777 == 0o600
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))
        assert not folder.exists()


async def test_the_handshake_answers_the_same_bytes_each_time(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        request = pb.GetCapabilitiesRequest(gateway=peer())
        answers: set[Any] = {(await link.stub.GetCapabilities(request)).SerializeToString() for _ in range(3)}
        assert len(answers) == 1
