"""Which volumes a sandbox may mount: labels, identities, and volumes that are bind mounts in disguise."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_docker import labels
from driver_docker.config import DriverConfig
from driver_docker.config_sources import load_config
from driver_docker.engine import (
    EngineAbsentError,
    EngineError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
)
from driver_docker.engine_objects import (
    ContainerFacts,
    ContainerStatus,
    EngineInfo,
    HealthStatus,
    MountFacts,
    VolumeFacts,
)
from driver_docker.mounts import BindRequest, TmpfsRequest, VolumeRequest
from driver_docker.volume_admission import (
    AdmissionDeniedError,
    AdmissionLookupError,
    VolumeAdmission,
    VolumeIdentity,
    check_volume,
    decode_identities,
    encode_identities,
    identity_of,
    is_bind_backed,
    required_labels,
)
from openshell.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from driver_docker.engine import Engine

ADMITTED = {"openshell.ai/sandbox-attachable": "true", "openshell.ai/sandbox-attachable-workspace": "team"}
MADE = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
OPEN = {"resource_admission": {"enabled": False}}


def config(**values: Any) -> DriverConfig:
    return load_config({"bind_socket": Path("/run/d.sock"), "allow_driver_config": True} | values, environment={})


def volume(
    name: str = "cache",
    *,
    marks: Mapping[str, str] | None = None,
    driver: str = "local",
    options: Mapping[str, str] | None = None,
) -> VolumeFacts:
    return VolumeFacts(
        name=name,
        driver=driver,
        labels=ADMITTED if marks is None else marks,
        options=options or {},
        created_at=MADE,
        mountpoint=f"/var/lib/docker/volumes/{name}/_data",
    )


def test_the_workspace_stands_in_for_its_placeholder() -> None:
    assert required_labels(config().resource_admission.required_labels, workspace="team") == ADMITTED


def test_a_volume_with_every_label_is_admitted() -> None:
    check_volume(volume(marks=ADMITTED | {"other": "x"}), config=config(), workspace="team")


@pytest.mark.parametrize(
    ("marks", "word"),
    [
        ({}, "lacks the label openshell.ai/sandbox-attachable"),
        ({"openshell.ai/sandbox-attachable": "true"}, "lacks the label openshell.ai/sandbox-attachable-workspace"),
        (ADMITTED | {"openshell.ai/sandbox-attachable": "TRUE"}, "does not have the required value"),
        (ADMITTED | {"openshell.ai/sandbox-attachable-workspace": "other"}, "does not have the required value"),
        (ADMITTED | {"openshell.ai/sandbox-attachable-workspace": "${workspace}"}, "does not have the required value"),
        (ADMITTED | {"openshell.ai/managed-by": "openshell"}, "belongs to a sandbox"),
    ],
)
def test_a_volume_without_its_labels_is_denied(marks: dict[str, str], word: str) -> None:
    with pytest.raises(AdmissionDeniedError) as denied:
        check_volume(volume(marks=marks), config=config(), workspace="team")
    assert word in denied.value.message
    assert (denied.value.reason, denied.value.status) == ("ResourceAdmissionDenied", StatusCode.FAILED_PRECONDITION)


def test_the_operators_own_labels_are_asked_for() -> None:
    own = config(resource_admission={"required_labels": {"acme/shared": "yes"}})
    check_volume(volume(marks={"acme/shared": "yes"}), config=own, workspace="team")
    with pytest.raises(AdmissionDeniedError, match="acme/shared"):
        check_volume(volume(), config=own, workspace="team")


@pytest.mark.parametrize("name", ["openshell-channel-1", "openshell-supervisor-1", "openshell-runtime-1"])
def test_a_sandboxs_own_volume_is_never_another_ones_even_without_admission(name: str) -> None:
    with pytest.raises(AdmissionDeniedError, match="belongs to a sandbox"):
        check_volume(volume(name, marks={}), config=config(**OPEN), workspace="team")


def test_without_admission_labels_do_not_matter() -> None:
    check_volume(volume(marks={}), config=config(**OPEN), workspace="team")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False),
        ({"o": "bind", "device": "/srv", "type": "none"}, True),
        ({"o": "bind", "device": "/srv"}, True),
        ({"o": "rw,bind", "device": "/srv"}, True),
        ({"o": " ro , BIND ", "device": "/srv", "type": ""}, True),
        ({"o": "rbind", "device": "/srv", "type": "nfs"}, True),
        ({"O": "Bind", "Device": "/srv"}, True),
        ({"type": "none", "device": "/srv"}, True),
        ({"type": "NONE", "device": "/srv", "o": "ro"}, True),
        ({"type": "bind", "device": "/srv"}, True),
        ({"device": "/srv"}, True),
        ({"type": "overlay", "o": "lowerdir=/,upperdir=/a,workdir=/b", "device": "overlay"}, True),
        ({"type": "ext4", "device": "/dev/sda1"}, True),
        ({"type": "tmpfs", "device": "tmpfs", "o": "size=1m"}, False),
        ({"type": "tmpfs", "device": "/srv", "o": "bind"}, True),
        ({"type": "nfs", "o": "addr=10.0.0.1,rw", "device": ":/share"}, False),
        ({"type": "cifs", "o": "username=x", "device": "//server/share"}, False),
        ({"size": "10g"}, False),
    ],
)
def test_a_bind_mount_is_seen_in_any_spelling(options: dict[str, str], expected: bool) -> None:
    facts = volume(options=options)
    assert is_bind_backed(facts) is expected
    assert is_bind_backed(replace(facts, driver="rclone")) is False
    if expected:
        with pytest.raises(AdmissionDeniedError, match="enable_bind_mounts"):
            check_volume(facts, config=config(), workspace="team")
        check_volume(facts, config=config(enable_bind_mounts=True), workspace="team")
    else:
        check_volume(facts, config=config(), workspace="team")


def test_the_identities_label_has_the_contracts_shape() -> None:
    text = encode_identities([identity_of(volume(options={"size": "1g"}))])
    assert json.loads(text) == {
        "cache": {
            "name": "cache",
            "driver": "local",
            "options": {"size": "1g"},
            "created_at": "2026-01-02T03:04:05+00:00",
            "mountpoint": "/var/lib/docker/volumes/cache/_data",
        }
    }
    assert encode_identities([]) == "{}"


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=10)


@given(
    st.lists(
        st.builds(
            VolumeIdentity,
            name=names,
            driver=names,
            options=st.dictionaries(names, names, max_size=3),
            created_at=names,
            mountpoint=names,
        ),
        unique_by=lambda identity: identity.name,
        max_size=4,
    )
)
def test_identities_are_read_back_as_written(identities: list[VolumeIdentity]) -> None:
    assert sorted(decode_identities(encode_identities(identities)), key=lambda i: i.name) == sorted(
        identities, key=lambda i: i.name
    )


@pytest.mark.parametrize("text", ["", "[]", "x", '{"a":1}', '{"a":{"name":"b","driver":"local"}}', '{"a":{"x":1}}'])
def test_a_label_that_this_driver_did_not_write_is_denied(text: str) -> None:
    with pytest.raises(AdmissionDeniedError, match="resource-admission-identities"):
        decode_identities(text)


class Volumes:
    """An engine of which only the volumes answer."""

    def __init__(self, *volumes: VolumeFacts, failure: EngineError | None = None, api: str = "1.42") -> None:
        self.volumes = {each.name: each for each in volumes}
        self.failure = failure
        self.info = EngineInfo(version="x", api_version=api, operating_system="linux", architecture="amd64")

    async def inspect_volume(self, name: str) -> VolumeFacts:
        if self.failure is not None:
            raise self.failure
        if name not in self.volumes:
            raise EngineAbsentError(f"no such volume: {name}")
        return self.volumes[name]


def admission(engine: Volumes, **values: Any) -> VolumeAdmission:
    asked: Any = engine
    typed: Engine = asked
    return VolumeAdmission(typed, config(**values))


MOUNTS = (
    VolumeRequest(source="cache", target="/cache"),
    VolumeRequest(source="data", target="/data"),
    VolumeRequest(source="cache", target="/again"),
    TmpfsRequest(target="/scratch"),
    BindRequest(source="/srv", target="/srv"),
)


async def test_each_volume_is_admitted_once() -> None:
    found = await admission(Volumes(volume(), volume("data"))).admit(MOUNTS, workspace="team")
    assert [identity.name for identity in found] == ["cache", "data"]


async def test_a_volume_that_does_not_exist_is_denied_and_not_made() -> None:
    with pytest.raises(AdmissionDeniedError, match="data does not exist"):
        await admission(Volumes(volume())).admit(MOUNTS, workspace="team")


@pytest.mark.parametrize(
    "failure", [EngineUnreachableError("cut"), EngineTimeoutError("slow"), EngineRefusedError("500")]
)
async def test_an_outage_is_no_denial(failure: EngineError) -> None:
    engine = Volumes(volume(), failure=failure)
    with pytest.raises(AdmissionLookupError) as unknown:
        await admission(engine).admit(MOUNTS, workspace="team")
    assert (unknown.value.reason, unknown.value.status) == ("ResourceAdmissionLookupFailed", StatusCode.UNAVAILABLE)
    assert unknown.value.retryable
    with pytest.raises(AdmissionLookupError):
        await admission(engine).recheck(container())


def container(*identities: VolumeFacts, mounts: tuple[MountFacts, ...] | None = None, **marks: str) -> ContainerFacts:
    admitted = identities or (volume(),)
    own = MountFacts(
        kind="volume", name="openshell-channel-1", source="", target="/.openshell/channel", read_only=False
    )
    user = tuple(
        MountFacts(kind="volume", name=each.name, source="", target=f"/{each.name}", read_only=True)
        for each in admitted
    )
    return ContainerFacts(
        container_id="c1",
        name="c",
        image_id="sha256:1",
        labels={
            labels.SANDBOX_WORKSPACE: "team",
            labels.CALLER_DRIVER_CONFIG_USED: "true",
            labels.RESOURCE_ADMISSION_IDENTITIES: encode_identities(identity_of(each) for each in admitted),
            labels.PRIVATE_IMAGE_VOLUME_TARGETS: '["/image-data"]',
        }
        | marks,
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
        mounts=(own, *user) if mounts is None else mounts,
    )


def mounted(kind: str, name: str, target: str) -> MountFacts:
    return MountFacts(kind=kind, name=name, source="/srv", target=target, read_only=True)


async def test_what_was_admitted_is_admitted_again() -> None:
    await admission(Volumes(volume())).recheck(container())


async def test_the_anonymous_volume_of_an_image_needs_no_admission() -> None:
    facts = container()
    extra = mounted("volume", "0" * 64, "/image-data")
    await admission(Volumes(volume())).recheck(replace(facts, mounts=(*facts.mounts, extra)))


@pytest.mark.parametrize(
    ("now", "word"),
    [
        (replace(volume(), created_at=MADE.replace(year=2027)), "removed and made again"),
        (replace(volume(), options={"o": "bind", "device": "/"}), "removed and made again"),
        (replace(volume(), driver="other"), "removed and made again"),
        (replace(volume(), mountpoint="/elsewhere"), "removed and made again"),
        (replace(volume(), labels={}), "lacks the label"),
        (volume("another"), "does not exist"),
    ],
)
async def test_a_volume_that_is_another_one_now_is_denied(now: VolumeFacts, word: str) -> None:
    with pytest.raises(AdmissionDeniedError, match=word):
        await admission(Volumes(now)).recheck(container())


async def test_an_engine_that_tells_the_last_change_as_the_creation_does_not_hide_a_used_volume() -> None:
    used = replace(volume(), created_at=MADE.replace(year=2027))
    await admission(Volumes(used, api="1.41")).recheck(container())
    for other in (
        replace(used, labels={}),
        replace(used, mountpoint="/elsewhere"),
        replace(used, options={"o": "bind", "device": "/"}),
        replace(used, driver="another"),
    ):
        with pytest.raises(AdmissionDeniedError):
            await admission(Volumes(other, api="1.41")).recheck(container())


async def test_a_volume_is_the_same_after_an_update_of_its_engine() -> None:
    """What was told as the creation was the last change until then, and lies after the creation."""
    await admission(Volumes(replace(volume(), created_at=MADE.replace(year=2025)))).recheck(container())
    await admission(Volumes(replace(volume(), created_at=None))).recheck(container())


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        (mounted("volume", "smuggled", "/x"), "smuggled at /x was not admitted"),
        (mounted("volume", "smuggled", "/.openshell/channel"), "smuggled at /.openshell/channel was not admitted"),
        (mounted("volume", "openshell-channel-2", "/x"), "openshell-channel-2 at /x was not admitted"),
        (mounted("bind", "", "/x"), "bind mounts are not allowed"),
    ],
)
async def test_what_nobody_admitted_is_denied(extra: MountFacts, word: str) -> None:
    facts = container()
    with pytest.raises(AdmissionDeniedError, match=word):
        await admission(Volumes(volume())).recheck(replace(facts, mounts=(*facts.mounts, extra)))


async def test_an_admitted_volume_that_is_not_mounted_is_denied() -> None:
    with pytest.raises(AdmissionDeniedError, match="cache was admitted for this sandbox but is not mounted"):
        await admission(Volumes(volume())).recheck(container(mounts=()))


async def test_a_bind_mount_stays_allowed_while_the_operator_allows_it() -> None:
    facts = container()
    facts = replace(facts, mounts=(*facts.mounts, mounted("bind", "", "/x")))
    await admission(Volumes(volume()), enable_bind_mounts=True, **OPEN).recheck(facts)
    with pytest.raises(AdmissionDeniedError, match="not allowed here any more"):
        await admission(Volumes(volume()), enable_bind_mounts=True).recheck(facts)


async def test_a_sandbox_with_a_driver_config_does_not_start_once_that_is_not_allowed() -> None:
    with pytest.raises(AdmissionDeniedError, match="does not allow any more"):
        await admission(Volumes(volume()), allow_driver_config=False).recheck(container())
    plain = container(mounts=(), **{labels.CALLER_DRIVER_CONFIG_USED: "false"})
    plain = replace(plain, labels=dict(plain.labels) | {labels.RESOURCE_ADMISSION_IDENTITIES: "{}"})
    await admission(Volumes(), allow_driver_config=False).recheck(plain)
