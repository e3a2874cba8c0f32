"""What the operator allows and what lies where is decided anew before every start, on the real engine."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from scripted.compute_gateway import launch_authentication, ready
from scripted.retained import read_text, refusal, start, stop, wait_ready_again

from driver_docker.volume_admission import CREATED_AT_API
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from docker import APIClient
    from scripted.driver_bench import DriverBench

ADMITTED = {"openshell.ai/sandbox-attachable": "true", "openshell.ai/sandbox-attachable-workspace": "default"}
PEM = b"-----BEGIN CERTIFICATE-----\nMAo=\n-----END CERTIFICATE-----\n"


@pytest.fixture
def volume(docker_client: APIClient) -> Iterator[str]:
    """A volume of the operator's, admitted; it must outlive every sandbox."""
    name = f"t-{secrets.token_hex(6)}"
    docker_client.create_volume(name, labels=ADMITTED)
    yield name
    # Whatever a failed test left would keep it in use.
    for row in docker_client.containers(all=True, filters={"volume": name}):
        docker_client.remove_container(row["Id"], force=True, v=True)
    docker_client.remove_volume(name)


def mounting(wanted: pb.DriverSandbox, **mount: Any) -> pb.DriverSandbox:
    wanted.spec.template.driver_config.update({"mounts": [mount]})
    return wanted


async def test_a_volume_stays_mounted_across_a_stop_and_a_start(bench: DriverBench, volume: str) -> None:
    async with bench.running(allow_driver_config=True) as (_, link):
        wanted = mounting(bench.sandbox(), type="volume", source=volume, target="/cache")
        await bench.launch(link, wanted)
        await stop(link, wanted.id)
        seen = len(link.events)
        await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
        assert ready(await wait_ready_again(link, wanted.id, seen)).reason == "BackendReady"
        mounts = {mount["Destination"]: mount.get("Name") for mount in bench.container(wanted.id, "sandbox")["Mounts"]}
        assert mounts["/cache"] == volume
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_a_volume_that_the_agent_has_written_to_is_still_the_one_that_was_admitted(
    bench: DriverBench, volume: str
) -> None:
    """Engines before API 1.42 tell the last change of a volume's content as the time of its creation."""
    async with bench.running(allow_driver_config=True) as (driver, link):
        wanted = mounting(bench.sandbox(), type="volume", source=volume, target="/tmp", read_only=False)
        await bench.launch(link, wanted)
        workload = bench.container(wanted.id, "sandbox")["Id"]
        made, moves = bench.client.inspect_volume(volume)["CreatedAt"], driver.services.engine.info.api < CREATED_AT_API
        for attempt in range(100):
            entry = bench.client.exec_create(workload, ["/bin/busybox", "touch", f"/tmp/{attempt}"], user="0")
            await asyncio.to_thread(bench.client.exec_start, entry["Id"])
            assert bench.client.exec_inspect(entry["Id"])["ExitCode"] == 0
            if not moves or bench.client.inspect_volume(volume)["CreatedAt"] != made:
                break  # it is told by the second
        else:
            pytest.fail("the engine's time of the volume did not move")
        await stop(link, wanted.id)
        seen = len(link.events)
        await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
        assert ready(await wait_ready_again(link, wanted.id, seen)).reason == "BackendReady"
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


@pytest.mark.parametrize(
    ("now", "word"),
    [
        ({"allow_driver_config": False}, "does not allow any more"),
        (
            {"allow_driver_config": True, "resource_admission": {"required_labels": {"acme/new": "yes"}}},
            "lacks the label acme/new",
        ),
    ],
)
async def test_what_the_operator_does_not_allow_any_more_does_not_start(
    bench: DriverBench, volume: str, now: dict[str, Any], word: str
) -> None:
    wanted = mounting(bench.sandbox(), type="volume", source=volume, target="/cache")
    async with bench.running(allow_driver_config=True) as (_, link):
        await bench.launch(link, wanted)
        await stop(link, wanted.id)
    launch = launch_authentication(generation="g-2")
    async with bench.running(**now) as (_, link):
        code, text = await refusal(start(link, wanted.id, "g-2", launch))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert word in text
        assert bench.container(wanted.id, "sandbox")["State"]["Running"] is False
    async with bench.running(allow_driver_config=True) as (_, link):
        seen = len(link.events)
        await start(link, wanted.id, "g-3", launch_authentication(generation="g-3"))
        await wait_ready_again(link, wanted.id, seen)
        assert bench.container(wanted.id, "sandbox")["State"]["Running"] is True
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


async def test_a_link_that_the_agent_made_does_not_bring_a_mount_over_the_runtime(
    bench: DriverBench, volume: str
) -> None:
    async with bench.running(allow_driver_config=True) as (_, link):
        wanted = mounting(bench.sandbox(), type="volume", source=volume, target="/sandbox/sub/runtime")
        await bench.launch(link, wanted)
        workload = bench.container(wanted.id, "sandbox")["Id"]
        for argv in (["mv", "/sandbox/sub", "/sandbox/old"], ["ln", "-s", "/.openshell", "/sandbox/sub"]):
            made = bench.client.exec_create(workload, ["/bin/busybox", *argv])
            output = await asyncio.to_thread(bench.client.exec_start, made["Id"])
            assert bench.client.exec_inspect(made["Id"])["ExitCode"] == 0, output
        await stop(link, wanted.id)
        code, text = await refusal(start(link, wanted.id, "g-2", launch_authentication(generation="g-2")))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "/.openshell/runtime through a symbolic link" in text
        assert bench.container(wanted.id, "sandbox")["State"]["Running"] is False
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))


@pytest.mark.parametrize("staging", ["lean", "upstream"])
async def test_the_operators_files_are_those_of_the_start(bench: DriverBench, tmp_path: Path, staging: str) -> None:
    auth, bundle = tmp_path / "auth", tmp_path / "bundle.pem"
    auth.write_bytes(b"first")
    bundle.write_bytes(PEM)
    changes: dict[str, Any] = {
        "staging": staging,
        "https_proxy": "https://proxy.example:3128",
        "proxy_auth_file": auth,
        "proxy_ca_bundle": bundle,
    }
    async with bench.running(**changes) as (_, link):
        wanted = bench.sandbox()
        await bench.launch(link, wanted)
        old = bench.container(wanted.id, "supervisor")
        await stop(link, wanted.id)
        auth.write_bytes(b"second")
        seen = len(link.events)
        await start(link, wanted.id, "g-2", launch_authentication(generation="g-2"))
        await wait_ready_again(link, wanted.id, seen)
        supervisor = bench.container(wanted.id, "supervisor")
        assert supervisor["Config"]["Cmd"] == old["Config"]["Cmd"]
        folder = "/.openshell/supervisor"
        assert read_text(bench.client, supervisor["Id"], f"{folder}/upstream-proxy-auth") == b"second"
        assert read_text(bench.client, supervisor["Id"], f"{folder}/upstream-proxy-ca-bundle.pem") == PEM
        writable = {mount["Destination"]: mount["RW"] for mount in supervisor["Mounts"]}[folder]
        assert writable is (staging == "lean")
        await link.stub.DeleteSandbox(pb.DeleteSandboxRequest(sandbox_id=wanted.id))
