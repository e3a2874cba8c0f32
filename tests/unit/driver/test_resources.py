"""What a launch takes of the engine, with an engine that only answers what it is asked."""

from __future__ import annotations

import base64
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from scripted.compute_gateway import sandbox

from driver_docker import encode
from driver_docker.config import DriverConfig
from driver_docker.config_sources import load_config
from driver_docker.engine import EngineAbsentError, EngineError, EngineRefusedError
from driver_docker.engine_objects import (
    ContainerFacts,
    ContainerStatus,
    EngineInfo,
    HealthStatus,
    ImageFacts,
    MountFacts,
    VolumeFacts,
)
from driver_docker.engine_wire import link_target
from driver_docker.errors import DriverError, PreconditionError
from driver_docker.mounts import MountError
from driver_docker.plan import SUPERVISOR_CA_DIR, ClaimedResources
from driver_docker.requests import LaunchRequest, decode_sandbox
from driver_docker.resources import Resources

if TYPE_CHECKING:
    from collections.abc import Mapping

GPUS = ("nvidia.com/gpu=0", "nvidia.com/gpu=1")
OPEN: dict[str, Any] = {"enable_bind_mounts": True, "resource_admission": {"enabled": False}}


@dataclass
class Answers:
    """The engine."""

    devices: tuple[str, ...] = ()
    image: ImageFacts | None = None
    volumes: Mapping[str, VolumeFacts] = field(default_factory=dict)
    links: Mapping[str, str | None] = field(default_factory=dict)
    """What exists in the container: a link's target, or `None`."""
    refreshes: int = 0
    asked: list[str] = field(default_factory=list)
    """References of the images that were looked at."""
    lacking: str = ""
    """The kind of limit that the kernel does not enforce."""

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            version="28",
            api_version="1.51",
            operating_system="linux",
            architecture="amd64",
            cdi_supported=bool(self.devices),
            cdi_devices=self.devices,
            **({f"{self.lacking}_limits": False} if self.lacking else {}),
        )

    async def refresh_info(self) -> EngineInfo:
        self.refreshes += 1
        return self.info

    async def inspect_image(self, reference: str) -> ImageFacts:
        self.asked.append(reference)
        if self.image is None:
            raise EngineAbsentError(reference)
        return self.image

    async def inspect_volume(self, name: str) -> VolumeFacts:
        if name not in self.volumes:
            raise EngineAbsentError(name)
        return self.volumes[name]

    async def link_target(self, _: str, path: str) -> str | None:
        if path not in self.links:
            raise EngineAbsentError(path)
        return self.links[path]


def config(**values: Any) -> DriverConfig:
    return load_config({"bind_socket": Path("/run/d.sock"), "allow_driver_config": True} | values, environment={})


def resources(engine: Answers, **values: Any) -> Resources:
    asked: Any = engine
    return Resources(asked, config(**values))


def request(*mounts: dict[str, Any], gpus: int = 0, devices: tuple[str, ...] = ()) -> LaunchRequest:
    wanted = sandbox("image:1")
    if mounts or devices:
        wanted.spec.template.driver_config.update({"mounts": list(mounts), "cdi_devices": list(devices)})
    if gpus:
        wanted.spec.resource_requirements.gpu.count = gpus
    return decode_sandbox(wanted, namespace="default", allow_driver_config=True)


async def test_a_launch_that_asks_for_nothing_asks_the_engine_nothing() -> None:
    engine = Answers()
    await resources(engine).check(request())
    assert await resources(engine).claim(request()) == ClaimedResources()
    assert engine.refreshes == 0


async def test_a_check_peeks_and_a_claim_moves_on() -> None:
    engine = Answers(devices=GPUS)
    made = resources(engine)
    for _ in range(3):
        await made.check(request(gpus=1))
    assert [(await made.claim(request(gpus=1))).cdi_devices for _ in range(3)] == [GPUS[:1], GPUS[1:], GPUS[:1]]
    assert engine.refreshes == 6
    assert (await made.claim(request(gpus=1, devices=GPUS[1:]))).cdi_devices == GPUS[1:]


async def test_a_card_that_went_away_after_the_check_is_noticed_at_the_claim() -> None:
    engine = Answers(devices=GPUS)
    made = resources(engine)
    await made.check(request(gpus=2))
    engine.devices = GPUS[:1]
    with pytest.raises(PreconditionError, match="lists 1 GPUs"):
        await made.claim(request(gpus=2))


@pytest.mark.parametrize("lacking", ["cpu", "memory", "pids"])
async def test_a_limit_that_the_engine_would_drop_is_refused_and_not_promised(lacking: str) -> None:
    wanted = sandbox("image:1")
    wanted.spec.template.resources.cpu_limit = "1"
    wanted.spec.template.resources.memory_limit = "64Mi"
    limited = decode_sandbox(wanted, namespace="default", allow_driver_config=True)
    engine = Answers(lacking=lacking)
    await resources(Answers()).check(limited)
    with pytest.raises(PreconditionError, match="cannot be enforced"):
        await resources(engine).check(limited)
    if lacking == "pids":
        with pytest.raises(PreconditionError, match="processes that every sandbox has"):
            await resources(engine).check(request())
    else:
        await resources(engine).check(request())
    told = encode.capabilities(config(), engine.info)
    assert told.resource_capabilities.cpu.limit_supported is (lacking != "cpu")
    assert told.resource_capabilities.memory.limit_supported is (lacking != "memory")
    promised = set(encode.capabilities(config()).extension.supported_capabilities)
    assert promised - set(told.extension.supported_capabilities) == {f"openshell.compute.{lacking}-limit.hard"}


async def test_a_bind_source_must_exist_where_the_engines_files_are_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///x.sock")
    wanted = request({"type": "bind", "source": str(tmp_path / "gone"), "target": "/a"})
    for place in ({}, {"socket_path": "unix:///x.sock"}, {"socket_path": "/x.sock"}):
        with pytest.raises(PreconditionError, match="does not exist"):
            await resources(Answers(), **OPEN, **place).check(wanted)
        with pytest.raises(PreconditionError, match="does not exist"):
            await resources(Answers(), **OPEN, **place).claim(wanted)
    await resources(Answers(), **OPEN, socket_path="tcp://10.0.0.1:2375").check(wanted)
    monkeypatch.setenv("DOCKER_HOST", "tcp://10.0.0.1:2375")
    await resources(Answers(), **OPEN).check(wanted)
    monkeypatch.setenv("DOCKER_HOST", "unix:///x.sock")
    (tmp_path / "gone").touch()
    await resources(Answers(), **OPEN).check(wanted)


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(36, "File name too long")])
async def test_a_bind_source_that_cannot_be_looked_at_is_refused_as_one_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def refuse(*_: object, **__: object) -> os.stat_result:
        raise error

    monkeypatch.setattr("os.stat", refuse)
    wanted = request({"type": "bind", "source": "/srv/hidden/x", "target": "/a"})
    with pytest.raises(PreconditionError, match="/srv/hidden/x does not exist, or the driver cannot see it"):
        await resources(Answers(), **OPEN, socket_path="/x.sock").check(wanted)


async def test_a_bind_source_with_a_name_that_no_disk_takes_is_refused() -> None:
    wanted = request({"type": "bind", "source": "/" + "a" * 300, "target": "/a"})
    with pytest.raises(PreconditionError, match="does not exist, or the driver cannot see it"):
        await resources(Answers(), **OPEN, socket_path="/x.sock").check(wanted)


async def test_the_early_check_looks_at_the_copy_that_a_launch_would_use() -> None:
    engine = Answers(image=ImageFacts(image_id="sha256:1", working_dir="/work/here"))
    wanted = request({"type": "tmpfs", "target": "/work"})
    with pytest.raises(MountError):
        await resources(engine).check(replace(wanted, image="image:1@sha256:" + "1" * 64))
    assert engine.asked == ["image@sha256:" + "1" * 64]
    # What is here is about to be replaced, and says nothing about the new one.
    await resources(engine, image_pull_policy="always").check(wanted)
    by_id = replace(wanted, image="sha256:" + "1" * 64)
    with pytest.raises(MountError):
        await resources(engine, image_pull_policy="always").check(by_id)


async def test_the_workspace_of_an_image_that_is_here_is_checked_early() -> None:
    wanted = request({"type": "tmpfs", "target": "/work"})
    await resources(Answers()).check(wanted)
    await resources(Answers(image=ImageFacts(image_id="sha256:1", working_dir="/elsewhere"))).check(wanted)
    with pytest.raises(MountError, match="covers the workspace /work/here"):
        await resources(Answers(image=ImageFacts(image_id="sha256:1", working_dir="/work/here"))).check(wanted)


OWN = {"/.openshell": None, "/.openshell/channel": None, "/run": None}


def created(*targets: str) -> ContainerFacts:
    return ContainerFacts(
        container_id="c1",
        name="c",
        image_id="sha256:1",
        labels={"openshell.ai/private-image-volume-targets": json.dumps(targets)},
        status=ContainerStatus.CREATED,
        exit_code=None,
        oom_killed=False,
        error="",
        created_at=None,
        started_at=None,
        finished_at=None,
        network_mode="none",
        networks=("none",),
        health=HealthStatus.NONE,
        memory_limit_bytes=None,
        tty=False,
        mounts=tuple(
            MountFacts(kind="volume", name="0" * 64, source="", target=target, read_only=False) for target in targets
        ),
    )


async def test_without_foreign_mounts_no_link_is_followed() -> None:
    await resources(Answers(links={"/.openshell": "/elsewhere"})).recheck(created(), workspace="/sandbox")


@pytest.mark.parametrize(
    ("links", "target"),
    [
        ({}, "/not/there/yet"),
        ({"/a": None, "/a/b": None}, "/a/b/c"),
        ({"/a": "/srv", "/srv/b": None}, "/a/b"),
        ({"/a": "/srv", "/srv/b": "/opt2"}, "/a/b/c"),
    ],
)
async def test_targets_on_free_ground_pass(links: dict[str, str | None], target: str) -> None:
    await resources(Answers(links=OWN | links)).recheck(created(target), workspace="/sandbox")


@pytest.mark.parametrize(
    ("links", "target", "word"),
    [
        ({"/a": "/.openshell"}, "/a/runtime", "leads to /.openshell/runtime"),
        ({"/a": "/b", "/b/c": "/run"}, "/a/c", "leads to /run"),
        ({"/a": None, "/a/b": "/"}, "/a/b", "leads to /"),
        ({"/a": "/"}, "/a/proc", "leads to /proc"),
        ({"/.openshell": "/elsewhere"}, "/x", "leads /.openshell/runtime to /elsewhere/runtime"),
        ({"/run": "/var/run"}, "/x", "leads /run/openshell-supervisor-ca/material to /var/run"),
    ],
)
@pytest.mark.parametrize("kind", ["volume", "tmpfs"])
async def test_a_link_that_moves_a_mount_or_the_sandboxs_own_folders_is_refused(
    links: dict[str, str | None], target: str, word: str, kind: str
) -> None:
    facts = created(target) if kind == "volume" else replace(created(), tmpfs_targets=(SUPERVISOR_CA_DIR, target))
    with pytest.raises(MountError) as refused:
        await resources(Answers(links=OWN | links)).recheck(facts, workspace="/sandbox")
    assert word in refused.value.message
    assert refused.value.reason == "WorkspaceValidationFailed"


async def test_the_memory_file_system_of_every_sandbox_is_no_foreign_mount() -> None:
    facts = replace(created(), tmpfs_targets=(SUPERVISOR_CA_DIR,))
    await resources(Answers(links={"/.openshell": "/elsewhere"})).recheck(facts, workspace="/w")


@pytest.mark.parametrize(
    ("links", "target", "workspace", "word"),
    [
        (
            {"/a": "/srv"},
            "/a",
            "/srv/work",
            "mount target /a leads to /srv through a symbolic link and covers the workspace /srv/work",
        ),
        ({"/work": "/srv/w", "/srv": None}, "/srv", "/work", "mount target /srv covers the workspace /srv/w"),
        (
            {"/work": "/srv/w", "/a": "/srv/w"},
            "/a",
            "/work",
            "mount target /a leads to /srv/w through a symbolic link and covers",
        ),
    ],
)
async def test_a_link_that_brings_a_mount_over_the_workspace_is_refused(
    links: dict[str, str | None], target: str, workspace: str, word: str
) -> None:
    with pytest.raises(MountError) as refused:
        await resources(Answers(links=OWN | links)).recheck(created(target), workspace=workspace)
    assert word in refused.value.message
    await resources(Answers(links=OWN | links)).recheck(created(f"{target}/below/it"), workspace=workspace)


def test_what_the_engine_tells_of_a_path_is_decoded() -> None:
    def header(stat: object) -> str:
        return base64.b64encode(json.dumps(stat).encode()).decode()

    assert link_target(header({"name": "x", "linkTarget": "/y"}), "x") == "/y"
    assert link_target(header({"name": "x", "linkTarget": ""}), "x") is None
    for broken in ("", "%", header([]), header({}), base64.b64encode(b"x").decode()):
        with pytest.raises(EngineError, match="cannot be read") as refused:
            link_target(broken, "x")
        assert isinstance(refused.value, DriverError)


async def test_more_cpus_than_the_host_has_are_refused_before_anything_is_launched() -> None:
    class Small(Answers):
        @property
        def info(self) -> EngineInfo:
            return replace(super().info, cpus=2)

    wanted = sandbox("image:1")
    for limit, fits in (("2", True), ("2001m", False)):
        wanted.spec.template.resources.cpu_limit = limit
        limited = decode_sandbox(wanted, namespace="default", allow_driver_config=True)
        await resources(Answers()).check(limited)
        if fits:
            await resources(Small()).check(limited)
        else:
            with pytest.raises(PreconditionError, match="above the 2 CPUs"):
                await resources(Small()).check(limited)


async def test_a_target_below_a_file_is_named_when_the_engine_cannot_look_at_it() -> None:
    class Refusing(Answers):
        async def link_target(self, container: str, path: str) -> str | None:
            if path == "/bin/sh/x":
                raise EngineRefusedError("the engine answered 500")
            return await super().link_target(container, path)

    engine = Refusing(links=OWN | {"/bin": None, "/bin/sh": None})
    with pytest.raises(MountError, match="mount target /bin/sh/x cannot be looked at"):
        await resources(engine).recheck(created("/bin/sh/x"), workspace="/sandbox")
