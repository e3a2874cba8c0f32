"""What the engine really got: mounts, labels, limits, proxies, and the refusals of what is not offered."""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from scripted.compute_gateway import SECRET, peer, ready
from scripted.stub_images import REPOSITORY

from driver_docker.engine import EngineUnreachableError
from driver_docker.labels import RESERVED
from openshell.isolation.documents import BoundaryBootstrap
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from docker import APIClient
    from scripted.compute_gateway import ComputeGateway
    from scripted.driver_bench import DriverBench

INVALID, PRECONDITION = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION
ADMITTED = {"openshell.ai/sandbox-attachable": "true", "openshell.ai/sandbox-attachable-workspace": "default"}
OPEN: dict[str, Any] = {
    "allow_driver_config": True,
    "enable_bind_mounts": True,
    "resource_admission": {"enabled": False},
}
PEM = b"-----BEGIN CERTIFICATE-----\nMAo=\n-----END CERTIFICATE-----\n"
USER_SECRET, PROXY_SECRET = "user-s3cr3t-0001", "proxy-s3cr3t-0002"


@pytest.fixture
def make_volume(docker_client: APIClient) -> Iterator[Callable[..., str]]:
    """Makes the operator's volumes; they are removed at the end, and must still be there then."""
    made: list[str] = []

    def make(labels: dict[str, str] | None = None, **options: str) -> str:
        name = f"t-{secrets.token_hex(6)}"
        docker_client.create_volume(name, driver_opts=options or None, labels=labels)
        made.append(name)
        return name

    yield make
    # Whatever a failed test left would keep them in use.
    for name in made:
        for row in docker_client.containers(all=True, filters={"volume": name}):
            docker_client.remove_container(row["Id"], force=True, v=True)
    for name in made:
        docker_client.remove_volume(name)


def with_mounts(wanted: pb.DriverSandbox, *mounts: dict[str, Any]) -> pb.DriverSandbox:
    wanted.spec.template.driver_config.update({"mounts": list(mounts)})
    return wanted


async def refusal(link: ComputeGateway, wanted: pb.DriverSandbox) -> grpc.aio.AioRpcError:
    """The one answer that Validate and Create both give."""
    told = []
    for call in (
        link.stub.ValidateSandboxCreate(pb.ValidateSandboxCreateRequest(sandbox=wanted)),
        link.stub.CreateSandbox(pb.CreateSandboxRequest(sandbox=wanted)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        told.append(refused.value)
    assert (told[0].code(), told[0].details()) == (told[1].code(), told[1].details())
    return told[0]


async def delete(link: ComputeGateway, wanted: pb.DriverSandbox) -> None:
    await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def execute(client: APIClient, container: str, *argv: str) -> str:
    def run() -> str:
        made = client.exec_create(container, list(argv))
        output: bytes = client.exec_start(made["Id"])
        return output.decode()

    return await asyncio.to_thread(run)


async def test_every_option_at_once_reaches_the_engine(
    bench: DriverBench, make_volume: Callable[..., str], tmp_path: Path
) -> None:
    for name, content in (("ca.pem", PEM), ("bundle.pem", PEM), ("auth", PROXY_SECRET.encode())):
        (tmp_path / name).write_bytes(content)
    for folder in ("ro", "rw", "backing", "spire"):
        (tmp_path / folder).mkdir()
    (tmp_path / "ro" / "file").write_text("from the host")
    plain = make_volume()
    backed = make_volume(type="none", o="bind", device=str(tmp_path / "backing"))
    changes: dict[str, Any] = OPEN | {
        "grpc_endpoint": "https://127.0.0.1:4711",
        "guest_tls_ca": tmp_path / "ca.pem",
        "https_proxy": "https://proxy.example:3128",
        "no_proxy": "localhost,10.0.0.0/8",
        "proxy_auth_file": tmp_path / "auth",
        "proxy_connect_by_hostname": True,
        "proxy_ca_bundle": tmp_path / "bundle.pem",
        "provider_spiffe_workload_api_socket": str(tmp_path / "spire" / "agent.sock"),
        "app_armor_profile": "Unconfined",
        "sandbox_pids_limit": 77,
        "log_level": "debug",
        "telemetry_enabled": True,
    }
    async with bench.running(**changes) as (_, link):
        wanted = bench.sandbox("all at once", labels={"team": "a"})
        with_mounts(
            wanted,
            {"type": "bind", "source": str(tmp_path / "ro"), "target": "/host/ro"},
            {
                "type": "bind",
                "source": str(tmp_path / "rw"),
                "target": "/host/rw",
                "read_only": False,
                "selinux_label": "shared",
            },
            {"type": "volume", "source": plain, "target": "/sandbox/cache", "read_only": False},
            {"type": "volume", "source": backed, "target": "/backed"},
            {"type": "tmpfs", "target": "/scratch", "options": ["noexec"], "size_bytes": 65536, "mode": 448},
        )
        wanted.spec.environment["API_KEY"] = USER_SECRET
        wanted.spec.template.resources.cpu_limit = "0.5"
        wanted.spec.template.resources.memory_limit = "64Mi"
        wanted.spec.workload_identity.user = "1500"
        wanted.spec.workload_identity.group = "1600"
        await bench.launch(link, wanted)
        workload, supervisor = bench.container(wanted.id, "sandbox"), bench.container(wanted.id, "supervisor")

        host, config = workload["HostConfig"], workload["Config"]
        assert host["Binds"] == [f"{tmp_path}/ro:/host/ro:ro", f"{tmp_path}/rw:/host/rw:z"]
        assert (config["User"], host["PidsLimit"], host["NanoCpus"], host["Memory"]) == (
            "1500:1600",
            77,
            500_000_000,
            64 * 2**20,
        )
        assert sorted(host["SecurityOpt"]) == ["apparmor=unconfined", "no-new-privileges:true"]
        assert host["NetworkMode"] == "none"
        assert (host["Dns"], host["DnsSearch"]) == (["127.0.0.53"], ["."])
        assert host["Sysctls"] == {"net.ipv4.ip_unprivileged_port_start": "0"}
        assert host["Tmpfs"] == {
            "/run/openshell-supervisor-ca/material": "rw,noexec,nosuid,nodev,size=1m,uid=1500,gid=1600,mode=0755",
            "/scratch": "noexec,size=65536,mode=700",
        }
        assert not host["DeviceRequests"]
        assert sorted(config["Env"]) == [
            "OPENSHELL_LOG_LEVEL=debug",
            "OPENSHELL_TELEMETRY_ENABLED=true",
            "PATH=/bin",
        ]
        mounts = {m["Destination"]: (m["Type"], m.get("Name", m["Source"]), m["RW"]) for m in workload["Mounts"]}
        assert mounts["/host/ro"] == ("bind", f"{tmp_path}/ro", False)
        assert mounts["/host/rw"] == ("bind", f"{tmp_path}/rw", True)
        assert mounts["/sandbox/cache"] == ("volume", plain, True)
        assert mounts["/backed"] == ("volume", backed, False)
        marks = config["Labels"]
        assert marks["openshell.ai/caller-driver-config-used"] == "true"
        identities = json.loads(marks["openshell.ai/resource-admission-identities"])
        assert sorted(identities) == sorted([plain, backed])
        assert identities[backed]["options"] == {"type": "none", "o": "bind", "device": f"{tmp_path}/backing"}
        assert await execute(bench.client, workload["Id"], "cat", "/host/ro/file") == "from the host"
        lines = (await execute(bench.client, workload["Id"], "cat", "/proc/mounts")).splitlines()
        (scratch,) = (line for line in lines if " /scratch " in line)
        assert "size=64k" in scratch
        assert "mode=700" in scratch
        assert "noexec" in scratch

        host, config = supervisor["HostConfig"], supervisor["Config"]
        assert config["Cmd"][7:] == [
            "--upstream-proxy",
            "https://proxy.example:3128",
            "--upstream-no-proxy",
            "localhost,10.0.0.0/8",
            "--upstream-proxy-auth-file",
            "/.openshell/supervisor/upstream-proxy-auth",
            "--upstream-proxy-connect-by-hostname",
            "--upstream-proxy-ca-bundle",
            "/.openshell/supervisor/upstream-proxy-ca-bundle.pem",
        ]
        environment = dict(entry.split("=", 1) for entry in config["Env"])
        assert environment["OPENSHELL_TLS_CA"] == "/.openshell/supervisor/tls/ca.pem"
        assert environment["OPENSHELL_PROVIDER_SPIFFE_WORKLOAD_API_SOCKET"] == f"{tmp_path}/spire/agent.sock"
        assert host["Binds"] == [f"{tmp_path}/spire:{tmp_path}/spire:ro"]
        assert host["ExtraHosts"] == ["host.openshell.internal:127.0.0.1", "host.docker.internal:127.0.0.1"]
        assert (host["NanoCpus"], host["Memory"], host["PidsLimit"]) == (0, 0, None)
        folder = "/.openshell/supervisor"
        assert await execute(bench.client, supervisor["Id"], "cat", f"{folder}/upstream-proxy-auth") == PROXY_SECRET
        assert await execute(bench.client, supervisor["Id"], "cat", f"{folder}/upstream-proxy-ca-bundle.pem") == (
            PEM.decode()
        )
        await delete(link, wanted)


async def test_field_report_49_secrets_are_in_files_alone(bench: DriverBench, tmp_path: Path) -> None:
    (tmp_path / "auth").write_text(PROXY_SECRET)
    changes: dict[str, Any] = {
        "https_proxy": "https://p.example:1",
        "proxy_auth_file": tmp_path / "auth",
        "log_level": "debug",
    }
    secret_values = (USER_SECRET, PROXY_SECRET, SECRET, SECRET[::-1])
    async with bench.running(**changes) as (driver, link):
        wanted = bench.sandbox()
        wanted.spec.environment["API_KEY"] = USER_SECRET
        wanted.spec.sandbox_token = SECRET
        await bench.launch(link, wanted)
        shown = [json.dumps(bench.container(wanted.id, role)) for role in ("sandbox", "supervisor")]
        shown += [str(event) for _, event in link.events]
        shown.append(str((await link.stub.GetSandbox(pb.GetSandboxRequest(sandbox_id=wanted.id))).sandbox))
        processes = bench.client.top(bench.container(wanted.id, "supervisor")["Id"])
        shown.append(json.dumps(processes))
        shown.append(repr(driver.services.table.by_id(wanted.id)))
        for text in shown:
            assert not any(value in text for value in secret_values)
        for file in driver.services.store.directory.rglob("*"):
            assert file.stat().st_mode & 0o077 == 0, file
        await delete(link, wanted)
        assert not (driver.services.store.directory / wanted.id).exists()


async def test_an_admitted_volume_is_mounted_and_remembered(
    bench: DriverBench, make_volume: Callable[..., str]
) -> None:
    async with bench.running(allow_driver_config=True) as (driver, link):
        name = make_volume(ADMITTED)
        wanted = with_mounts(bench.sandbox(), {"type": "volume", "source": name, "target": "/cache"})
        await bench.launch(link, wanted)
        workload = bench.container(wanted.id, "sandbox")
        real = bench.client.inspect_volume(name)
        identity = json.loads(workload["Config"]["Labels"]["openshell.ai/resource-admission-identities"])[name]
        assert (identity["driver"], identity["mountpoint"]) == ("local", real["Mountpoint"])
        assert identity["created_at"][:10] == real["CreatedAt"][:10]
        facts = await driver.services.engine.inspect_container(workload["Id"])
        await driver._launcher.resources.recheck(facts, workspace="/sandbox")
        await delete(link, wanted)


@pytest.mark.parametrize(
    ("labels", "options", "word"),
    [
        ({}, {}, "lacks the label openshell.ai/sandbox-attachable"),
        (ADMITTED | {"openshell.ai/sandbox-attachable-workspace": "other"}, {}, "does not have the required value"),
        (ADMITTED, {"type": "none", "o": "bind", "device": "/srv"}, "enable_bind_mounts"),
        (ADMITTED, {"type": "tmpfs", "o": "ro,bind", "device": "/srv"}, "enable_bind_mounts"),
        (ADMITTED | {"openshell.ai/managed-by": "openshell"}, {}, "belongs to a sandbox"),
    ],
)
async def test_a_volume_that_is_not_admitted_is_refused_before_anything_is_made(
    bench: DriverBench,
    make_volume: Callable[..., str],
    labels: dict[str, str],
    options: dict[str, str],
    word: str,
) -> None:
    async with bench.running(allow_driver_config=True) as (_, link):
        name = make_volume(labels, **options)
        wanted = with_mounts(bench.sandbox(), {"type": "volume", "source": name, "target": "/cache"})
        told = await refusal(link, wanted)
        assert told.code() is PRECONDITION
        assert word in (told.details() or "")
        assert bench.sandbox_left_over(wanted.id) == []


async def test_a_volume_that_does_not_exist_is_refused_and_not_made(bench: DriverBench) -> None:
    async with bench.running(allow_driver_config=True) as (_, link):
        name = f"t-{secrets.token_hex(6)}"
        told = await refusal(link, with_mounts(bench.sandbox(), {"type": "volume", "source": name, "target": "/cache"}))
        assert told.code() is PRECONDITION
        assert f"{name} does not exist" in (told.details() or "")
        assert not [volume for volume in bench.client.volumes()["Volumes"] or [] if volume["Name"] == name]


async def test_a_volume_swapped_between_admission_and_creation_is_denied(
    bench: DriverBench, make_volume: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench.running(allow_driver_config=True) as (driver, link):
        name = make_volume(ADMITTED)
        engine: Any = driver.services.engine
        create = engine.create_container

        async def swap_first(spec: Any) -> str:
            if any(mount.volume == name for mount in spec.volumes):
                bench.client.remove_volume(name)
                bench.client.create_volume(name)
            made: str = await create(spec)
            return made

        monkeypatch.setattr(engine, "create_container", swap_first)
        wanted = with_mounts(bench.sandbox(), {"type": "volume", "source": name, "target": "/cache"})
        observed = await bench.launch(link, wanted)
        assert ready(observed).reason == "ResourceAdmissionDenied"
        assert name in ready(observed).message
        await delete(link, wanted)
        assert bench.sandbox_left_over(wanted.id) == []


async def test_an_outage_of_the_look_up_is_unavailable_and_no_denial(
    bench: DriverBench, make_volume: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench.running(allow_driver_config=True) as (driver, link):
        name = make_volume(ADMITTED)
        engine: Any = driver.services.engine

        async def cut(_: str) -> None:
            raise EngineUnreachableError("the engine does not answer")

        wanted = with_mounts(bench.sandbox(), {"type": "volume", "source": name, "target": "/cache"})
        with monkeypatch.context() as patch:
            patch.setattr(engine, "inspect_volume", cut)
            told = await refusal(link, wanted)
        assert told.code() is grpc.StatusCode.UNAVAILABLE
        await link.stub.ValidateSandboxCreate(pb.ValidateSandboxCreateRequest(sandbox=wanted))


async def test_field_report_47_the_operators_volume_outlives_every_sandbox(
    bench: DriverBench, make_volume: Callable[..., str]
) -> None:
    async with bench.running(allow_driver_config=True) as (_, link):
        name = make_volume(ADMITTED)
        mount = {"type": "volume", "source": name, "target": "/cache", "read_only": False}
        first, second = (with_mounts(bench.sandbox(each), mount) for each in ("one", "two"))
        first.spec.workload_identity.user = second.spec.workload_identity.user = "1500"
        first.spec.workload_identity.group = second.spec.workload_identity.group = "1500"
        await bench.launch(link, first)
        await bench.launch(link, second)
        for wanted in (first, second):
            await delete(link, wanted)
            assert bench.sandbox_left_over(wanted.id) == []
            assert bench.client.inspect_volume(name)["Labels"] == ADMITTED


@pytest.fixture
def volume_image(bench: DriverBench, docker_client: APIClient) -> Iterator[Callable[..., str]]:
    """Derives images from the stand-in workload."""
    made: list[str] = []

    def derive(*changes: str) -> str:
        tag = secrets.token_hex(4)
        container = docker_client.create_container(
            bench.images.workload, entrypoint=["/x"], labels={"openshell.ai/sandbox-namespace": bench.namespace}
        )
        docker_client.commit(container["Id"], repository=f"{REPOSITORY}/derived", tag=tag, changes=list(changes))
        docker_client.remove_container(container["Id"])
        made.append(f"{REPOSITORY}/derived:{tag}")
        return made[-1]

    yield derive
    for reference in made:
        docker_client.remove_image(reference, force=True)


async def test_the_volumes_of_an_image_are_private_and_go_with_the_sandbox(
    bench: DriverBench, volume_image: Callable[..., str]
) -> None:
    async with bench.running(allow_driver_config=True) as (_, link):
        wanted = bench.sandbox(image=volume_image("VOLUME /image-data", "WORKDIR /work"))
        await bench.launch(link, wanted)
        workload = bench.container(wanted.id, "sandbox")
        assert workload["Config"]["Labels"]["openshell.ai/private-image-volume-targets"] == '["/image-data"]'
        assert bench.container(wanted.id, "supervisor")["Config"]["Cmd"][4:6] == ["--workdir", "/work"]
        (private,) = (m["Name"] for m in workload["Mounts"] if m["Destination"] == "/image-data")
        await delete(link, wanted)
        assert not [v for v in bench.client.volumes()["Volumes"] or [] if v["Name"] == private]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (("VOLUME /work", "WORKDIR /work/here"), "covers its working directory"),
        (("WORKDIR /run/openshell/x",), "overlaps /run/openshell"),
        (("WORKDIR /proc/self",), "overlaps /proc"),
        (("VOLUME /.openshell/channel/sandbox",), "lies in /.openshell"),
    ],
)
async def test_an_image_whose_workspace_cannot_be_one_is_refused(
    bench: DriverBench, volume_image: Callable[..., str], changes: tuple[str, ...], word: str
) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox(image=volume_image(*changes))
        observed = await bench.launch(link, wanted)
        assert ready(observed).reason == "WorkspaceValidationFailed"
        assert word in ready(observed).message
        await delete(link, wanted)


async def test_neither_an_image_nor_a_caller_forges_a_label_that_the_driver_reads(
    bench: DriverBench, volume_image: Callable[..., str]
) -> None:
    forged = dict.fromkeys(sorted(RESERVED), "forged")
    async with bench.running() as (driver, link):
        image = volume_image(*(f"LABEL {key}={value}" for key, value in forged.items()), "LABEL kept=yes")
        wanted = bench.sandbox(image=image, labels=forged | {"team": "a"})
        assert ready(await bench.launch(link, wanted)).reason == "BackendReady"
        marks = bench.container(wanted.id, "sandbox")["Config"]["Labels"]
        assert not [key for key in RESERVED if marks[key] == "forged"]
        assert (marks["kept"], marks["team"]) == ("yes", "a")
        assert marks["openshell.ai/sandbox-id"] == wanted.id
        assert marks["openshell.ai/driver-owner"] == driver.services.owner.driver
        listed = await link.stub.ListSandboxes(pb.ListSandboxesRequest())
        assert [each.id for each in listed.sandboxes] == [wanted.id]
        await delete(link, wanted)
        assert bench.sandbox_left_over(wanted.id) == []


async def test_a_mount_over_the_workspace_of_a_present_image_is_refused(
    bench: DriverBench, volume_image: Callable[..., str]
) -> None:
    async with bench.running(allow_driver_config=True) as (_, link):
        wanted = with_mounts(
            bench.sandbox(image=volume_image("WORKDIR /work/here")), {"type": "tmpfs", "target": "/work"}
        )
        told = await refusal(link, wanted)
        assert told.code() is PRECONDITION
        assert "covers the workspace /work/here" in (told.details() or "")


def _update(**config: Any) -> Callable[[pb.DriverSandbox], None]:
    return lambda wanted: wanted.spec.template.driver_config.update(config)


def _resources(**quantities: str) -> Callable[[pb.DriverSandbox], None]:
    def change(wanted: pb.DriverSandbox) -> None:
        for key, value in quantities.items():
            setattr(wanted.spec.template.resources, key, value)

    return change


def _gpu(count: int | None) -> Callable[[pb.DriverSandbox], None]:
    def change(wanted: pb.DriverSandbox) -> None:
        wanted.spec.resource_requirements.gpu.SetInParent()
        if count is not None:
            wanted.spec.resource_requirements.gpu.count = count

    return change


BIND = {"type": "bind", "source": "/nowhere/at/all", "target": "/a"}


@pytest.mark.parametrize(
    ("change", "config", "code", "word"),
    [
        (lambda m: m.ClearField("spec"), {}, INVALID, "sandbox.spec is missing"),
        (lambda m: m.spec.ClearField("template"), {}, INVALID, "template is missing"),
        (lambda m: setattr(m.spec.template, "agent_socket_path", "/x"), {}, PRECONDITION, "agent_socket_path"),
        (
            lambda m: m.spec.template.platform_config.update({"host_users": True}),
            {},
            PRECONDITION,
            "host_users",
        ),
        (_update(mounts=[]), {}, PRECONDITION, "allow_driver_config"),
        (_update(nonsense=1), {"allow_driver_config": True}, INVALID, "invalid docker driver_config: unknown key"),
        (
            _update(mounts=[{"type": "tmpfs", "target": "/a", "size_bytes": float("nan")}]),
            {"allow_driver_config": True},
            INVALID,
            "invalid docker driver_config: mounts[0].size_bytes",
        ),
        (_update(mounts=[BIND]), {"allow_driver_config": True}, PRECONDITION, "enable_bind_mounts"),
        (
            _update(mounts=[BIND]),
            {"allow_driver_config": True, "enable_bind_mounts": True},
            PRECONDITION,
            "resource admission is enabled",
        ),
        (_update(mounts=[BIND]), OPEN, PRECONDITION, "/nowhere/at/all does not exist"),
        (
            _update(mounts=[{"type": "image", "source": "x", "target": "/a"}]),
            OPEN,
            PRECONDITION,
            "mounts of type image are not supported",
        ),
        (
            _update(mounts=[{"type": "volume", "source": "vol", "target": "/a", "subpath": "x"}]),
            OPEN,
            PRECONDITION,
            "subpath needs an engine",
        ),
        (_resources(cpu_request="1"), {}, PRECONDITION, "cpu_request"),
        (_resources(memory_request="1Gi"), {}, PRECONDITION, "memory_request"),
        (_resources(memory_limit="5Mi"), {}, PRECONDITION, "least memory limit"),
        (_resources(cpu_limit="1m"), {}, PRECONDITION, "least CPU limit"),
        (_gpu(0), {}, INVALID, "at least 1"),
        (_gpu(None), {}, PRECONDITION, "no CDI support"),
        (_gpu(2), {}, PRECONDITION, "no CDI support"),
        (
            _update(cdi_devices=["nvidia.com/gpu=0"]),
            {"allow_driver_config": True},
            INVALID,
            "needs resource_requirements.gpu",
        ),
    ],
)
async def test_what_is_malformed_or_not_offered_is_refused_with_its_code(
    bench: DriverBench,
    change: Callable[[pb.DriverSandbox], None],
    config: dict[str, Any],
    code: grpc.StatusCode,
    word: str,
) -> None:
    async with bench.running(**config) as (_, link):
        wanted = bench.sandbox()
        change(wanted)
        told = await refusal(link, wanted)
        assert told.code() is code
        assert word in (told.details() or "")
        assert bench.sandbox_left_over(wanted.id) == []


async def test_an_engine_without_cdi_offers_no_gpu(bench: DriverBench) -> None:
    async with bench.running() as (driver, link):
        answer = await link.stub.GetCapabilities(pb.GetCapabilitiesRequest(gateway=peer()))
        gpu = answer.resource_capabilities.gpu
        info = driver.services.engine.info
        assert (gpu.default_selection_supported, gpu.count_selection_supported) == (info.cdi_supported,) * 2


@pytest.mark.parametrize("name", ["-", "ä", "...", "ÄÖ Ü", "a" * 253])
async def test_field_report_74_any_name_gives_a_container_that_the_engine_takes(bench: DriverBench, name: str) -> None:
    async with bench.running() as (_, link):
        wanted = bench.sandbox(name)
        observed = await bench.launch(link, wanted)
        assert (observed.name, ready(observed).reason) == (name, "BackendReady")
        await delete(link, wanted)


async def test_one_name_in_two_workspaces_is_two_sandboxes(bench: DriverBench) -> None:
    async with bench.running() as (_, link):
        first, second = bench.sandbox("same"), bench.sandbox("same")
        second.workspace = "other"
        for wanted in (first, second):
            assert ready(await bench.launch(link, wanted)).reason == "BackendReady"
        names = {bench.container(wanted.id, "sandbox")["Name"] for wanted in (first, second)}
        assert len(names) == 2
        with pytest.raises(grpc.aio.AioRpcError) as ambiguous:
            await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(name="same"))
        assert ambiguous.value.code() is PRECONDITION
        await delete(link, first)
        got = await link.stub.GetSandbox(pb.GetSandboxRequest(name="same"))
        assert (got.sandbox.id, got.sandbox.workspace) == (second.id, "other")
        await delete(link, second)


async def test_protected_names_do_not_reach_the_agent_and_its_own_do(
    bench: DriverBench,
) -> None:
    async with bench.running() as (driver, link):
        wanted = bench.sandbox(environment={"A": "template", "B": "template"})
        wanted.spec.environment.update({"B": "spec", "OPENSHELL_ENDPOINT": "http://evil", "OPENSHELL_MINE": "kept"})
        await bench.launch(link, wanted)
        file = driver.services.store.directory / wanted.id / "boundary-bootstrap.json"
        bootstrap = BoundaryBootstrap.from_json(file.read_bytes())
        assert bootstrap.child_env == {"A": "template", "B": "spec", "OPENSHELL_MINE": "kept"}
        await delete(link, wanted)


async def test_a_missing_folder_for_supervisors_fails_the_launch_and_is_not_made(
    bench: DriverBench, tmp_path: Path
) -> None:
    folder = tmp_path / "spire"
    async with bench.running(provider_spiffe_workload_api_socket=str(folder / "agent.sock")) as (_, link):
        wanted = bench.sandbox()
        observed = await bench.launch(link, wanted)
        assert ready(observed).reason == "BoundaryConfigWriteFailed"
        assert str(folder) in ready(observed).message
        await delete(link, wanted)
    assert not folder.exists()


async def test_upstreams_staging_leaves_a_read_only_volume_with_the_supervisors_own_files(bench: DriverBench) -> None:
    async with bench.running(staging="upstream") as (_, link):
        wanted = bench.sandbox()
        assert ready(await bench.launch(link, wanted)).reason == "BackendReady"
        supervisor = bench.container(wanted.id, "supervisor")
        mounts = {mount["Destination"]: mount["RW"] for mount in supervisor["Mounts"]}
        assert mounts == {"/.openshell/channel": False, "/.openshell/supervisor": False}
        for name in ("runtime-descriptor.json", "auth.json"):
            _, stat = bench.client.get_archive(supervisor["Id"], f"/.openshell/supervisor/{name}")
            assert stat["mode"] & 0o777 == 0o600
        readable = await execute(bench.client, supervisor["Id"], "cat", "/.openshell/supervisor/auth.json")
        assert SECRET in readable
        assert not [name for name in bench.sandbox_left_over(wanted.id) if name.endswith("-stage")]
        await delete(link, wanted)
