"""Mount rules of compute-driver contract 5.12, and the engine's form of what passed them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf.struct_pb2 import Struct
from hypothesis import example, given
from hypothesis import strategies as st

from driver_docker.driver_config import CallerConfig, decode_driver_config
from driver_docker.errors import DriverError, InvalidRequestError
from driver_docker.mounts import (
    CONTROL_PATHS,
    BindRequest,
    ImageRequest,
    MountError,
    SelinuxLabel,
    TmpfsRequest,
    VolumeRequest,
    bind_option,
    check_against_workspace,
    check_offered,
    check_resolved,
    checked_target,
    engine_binds,
    engine_tmpfs,
    engine_volumes,
    selinux_hint,
)
from driver_docker.workspace import overlaps
from openshell.status import StatusCode

if TYPE_CHECKING:
    from driver_docker.mounts import MountRequest

NEW, OLD = (1, 47), (1, 41)


def decode(config: dict[str, Any], *, allow: bool = True) -> CallerConfig:
    struct = Struct()
    struct.update(config)
    return decode_driver_config(struct, allow=allow)


def mount(**values: Any) -> MountRequest:
    return decode({"mounts": [values]}).mounts[0]


def refused(config: dict[str, Any]) -> str:
    with pytest.raises(InvalidRequestError) as error:
        decode(config)
    assert error.value.status is StatusCode.INVALID_ARGUMENT
    assert error.value.message.startswith("invalid docker driver_config: ")
    return error.value.message


@pytest.mark.parametrize(
    "option",
    [
        *("size=64m", "size=1G", "size=50%", "size=4096", "size=2T", "mode=1777", "mode=0700", "mode=7", "uid=0"),
        *("gid=4294967294", "nr_inodes=0", "nr_inodes=10k", "nr_blocks=5", "mpol=default", "mpol=local"),
        *("mpol=interleave", "mpol=prefer:1", "mpol=bind:0-3", "mpol=bind=static:0", "mpol=interleave=relative:1"),
        *("mode=01777", "mode=00000755", "size=150%", "size=1000%", "size=5%", "size=010m", "size=01%"),
    ],
)
def test_values_of_tmpfs_options_that_the_kernel_takes_pass(option: str) -> None:
    assert mount(type="tmpfs", target="/a", options=[option]) == TmpfsRequest(target="/a", options=(option,))


def test_nothing_sent_is_nothing_used() -> None:
    assert decode({}) == CallerConfig()
    assert decode({}, allow=False).used is False


def test_an_empty_list_is_a_driver_config_all_the_same() -> None:
    assert decode({"mounts": []}) == CallerConfig(used=True)
    with pytest.raises(DriverError) as error:
        decode({"mounts": []}, allow=False)
    assert error.value.status is StatusCode.FAILED_PRECONDITION
    assert "allow_driver_config" in error.value.message


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"type": "bind", "source": "/srv/data", "target": "/data"},
            BindRequest(source="/srv/data", target="/data", read_only=True),
        ),
        (
            {"type": "bind", "source": "/srv/a b", "target": "/data/", "read_only": False, "selinux_label": "private"},
            BindRequest(source="/srv/a b", target="/data", read_only=False, selinux=SelinuxLabel.PRIVATE),
        ),
        ({"type": "volume", "source": "cache", "target": "/cache"}, VolumeRequest(source="cache", target="/cache")),
        (
            {"type": "volume", "source": "cache.1", "target": "/c", "read_only": False, "subpath": "a/b"},
            VolumeRequest(source="cache.1", target="/c", read_only=False, subpath="a/b"),
        ),
        ({"type": "tmpfs", "target": "/scratch"}, TmpfsRequest(target="/scratch")),
        (
            {"type": "tmpfs", "target": "/scratch", "options": ["noexec", "uid=1000"], "size_bytes": 1024, "mode": 448},
            TmpfsRequest(target="/scratch", options=("noexec", "uid=1000"), size_bytes=1024, mode=0o700),
        ),
        ({"type": "image", "source": "alpine:3", "target": "/a"}, ImageRequest(source="alpine:3", target="/a")),
        (
            {"type": "volume", "source": "cache", "target": "/c", "subpath": None, "read_only": None},
            VolumeRequest(source="cache", target="/c"),
        ),
    ],
)
def test_each_kind_of_mount_is_understood(values: dict[str, Any], expected: MountRequest) -> None:
    assert mount(**values) == expected


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"target": "/a"}, "mounts[0].type is missing"),
        ({"type": "nfs", "target": "/a"}, "mounts[0].type must be"),
        ({"type": "tmpfs"}, "mounts[0].target is missing"),
        ({"type": "bind", "target": "/a"}, "mounts[0].source is missing"),
        ({"type": "volume", "target": "/a", "source": 5}, "mounts[0].source must be text"),
        ({"type": "volume", "target": "/a", "source": "v", "options": []}, "mounts[0].source must be the name"),
        ({"type": "volume", "target": "/a", "source": "vol", "options": []}, "unknown key mounts[0].options"),
        ({"type": "tmpfs", "target": "/a", "read_only": True}, "unknown key mounts[0].read_only"),
        ({"type": "bind", "source": "/s", "target": "/a", "propagation": "shared"}, "unknown key mounts[0].propa"),
        ({"type": "bind", "source": "/s", "target": "/a", "read_only": "yes"}, "mounts[0].read_only must be true"),
        ({"type": "bind", "source": "/s", "target": "/a", "read_only": 1}, "mounts[0].read_only must be true"),
        ({"type": "bind", "source": "/s", "target": "/a", "selinux_label": "z"}, "mounts[0].selinux_label must be"),
        ({"type": "bind", "source": "s", "target": "/a"}, "mounts[0].source must be an absolute"),
        ({"type": "bind", "source": "/s/../t", "target": "/a"}, "mounts[0].source must be an absolute"),
        ({"type": "bind", "source": "/s:/t", "target": "/a"}, "mounts[0].source must not hold ':'"),
        ({"type": "volume", "source": "../x", "target": "/a"}, "mounts[0].source must be the name"),
        ({"type": "volume", "source": "a/b", "target": "/a"}, "mounts[0].source must be the name"),
        ({"type": "volume", "source": "vol", "target": "/a", "subpath": "/x"}, "mounts[0].subpath must be"),
        ({"type": "volume", "source": "vol", "target": "/a", "subpath": "x/../y"}, "mounts[0].subpath must be"),
        ({"type": "volume", "source": "vol", "target": "/a", "subpath": "x//y"}, "mounts[0].subpath must be"),
        ({"type": "volume", "source": "vol", "target": "/a", "subpath": ""}, "mounts[0].subpath must not be empty"),
        ({"type": "tmpfs", "target": "a"}, "mounts[0].target must be an absolute"),
        ({"type": "tmpfs", "target": ""}, "mounts[0].target must not be empty"),
        ({"type": "tmpfs", "target": "/"}, "mounts[0].target must not be '/'"),
        ({"type": "tmpfs", "target": "/a:/b"}, "mounts[0].target must not hold ':'"),
        ({"type": "tmpfs", "target": "/dev"}, "mounts[0].target must not be /dev"),
        ({"type": "tmpfs", "target": "/a", "size_bytes": 0}, "mounts[0].size_bytes must be greater than 0"),
        ({"type": "tmpfs", "target": "/a", "size_bytes": -5}, "mounts[0].size_bytes must be greater than 0"),
        ({"type": "tmpfs", "target": "/a", "size_bytes": "1k"}, "mounts[0].size_bytes must be a whole number"),
        ({"type": "tmpfs", "target": "/a", "size_bytes": True}, "mounts[0].size_bytes must be a whole number"),
        ({"type": "tmpfs", "target": "/a", "mode": -1}, "mounts[0].mode must be"),
        ({"type": "tmpfs", "target": "/a", "mode": 0o10000}, "mounts[0].mode must be"),
        ({"type": "tmpfs", "target": "/a", "options": "noexec"}, "mounts[0].options must be a list"),
        ({"type": "tmpfs", "target": "/a", "options": ["bind"]}, "mounts[0].options[0] is no tmpfs option"),
        ({"type": "tmpfs", "target": "/a", "options": ["noexec,suid"]}, "mounts[0].options[0] is no tmpfs option"),
        ({"type": "tmpfs", "target": "/a", "options": ["uid="]}, "mounts[0].options[0] is no value for uid"),
        ({"type": "tmpfs", "target": "/a", "options": ["uid=1,gid=0"]}, "mounts[0].options[0] is no value for uid"),
        *(
            ({"type": "tmpfs", "target": "/a", "options": [option]}, f"mounts[0].options[0] is no value for {key}")
            for key, values in {
                "size": ("lots", "0", "-1", "1x", "1.5m", "0%", "00%", "08m", "09%", "%", "1mm", "9" * 30),
                "mode": ("9999", "0x1ff", "-1", "u=rwx", "77777"),
                "uid": ("abc", "-1", "4294967295", "9" * 30),
                "gid": ("abc", "1k"),
                "nr_inodes": ("many", "-1", "50%"),
                "nr_blocks": ("many",),
                "mpol": ("anything", "bind", "default:0", "interleave:0-", "prefer=static", "prefer:0-1", "bind:0,2"),
            }.items()
            for option in (f"{key}={value}" for value in values)
        ),
        ({"type": "tmpfs", "target": "/a", "options": ["ro", "ro"]}, "mounts[0].options[1] says ro a second time"),
        ({"type": "tmpfs", "target": "/a", "options": ["size=1m"], "size_bytes": 5}, "says size a second time"),
    ],
)
def test_a_mount_that_breaks_a_rule_is_refused_by_its_path(values: dict[str, Any], words: str) -> None:
    assert words in refused({"mounts": [values]})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"mount": []}, "unknown key mount"),
        ({"mounts": {}}, "mounts must be a list"),
        ({"mounts": ["x"]}, "mounts[0] must be a table"),
        ({"cdi_devices": ["nvidia.com/gpu=" + "0" * 5000]}, "cdi_devices[0] must be text of at most 4096 bytes"),
        (
            {"mounts": [{"type": "tmpfs", "target": "/a", "options": ["mpol=" + "x" * 5000]}]},
            "mounts[0].options[0] must be text of at most 4096 bytes",
        ),
        ({"mounts": [{"type": "tmpfs", "target": "/a"}] * 2}, "mounts[1].target /a is used by another mount"),
        (
            {"mounts": [{"type": "tmpfs", "target": "/a/"}, {"type": "volume", "source": "vv", "target": "/a"}]},
            "mounts[1].target /a is used by another mount",
        ),
        ({"mounts": [{"type": "tmpfs", "target": f"/a{i}"} for i in range(65)]}, "at most 64"),
        ({"cdi_devices": "nvidia.com/gpu=0"}, "cdi_devices must be a list"),
        ({"cdi_devices": [0]}, "cdi_devices[0] must be text"),
        ({"cdi_devices": [""]}, "cdi_devices[0] must not be empty"),
        ({"cdi_devices": ["gpu0"]}, "cdi_devices[0] must be vendor/class=name"),
        ({"cdi_devices": ["nvidia.com/gpu=0", "nvidia.com/gpu=0"]}, "cdi_devices[1] nvidia.com/gpu=0 is listed twice"),
    ],
)
def test_a_driver_config_outside_the_schema_is_refused(config: dict[str, Any], words: str) -> None:
    assert words in refused(config)


@pytest.mark.parametrize("text", [" /data", "/data ", "/data\n", "\t/data", "/da\0ta", "/data\0", "\u00a0/data"])
@pytest.mark.parametrize("key", ["source", "target"])
def test_field_report_21_white_space_and_nul_are_refused_and_never_trimmed(key: str, text: str) -> None:
    values = {"type": "bind", "source": "/srv", "target": "/data"} | {key: text}
    assert f"mounts[0].{key}" in refused({"mounts": [values]})


@pytest.mark.parametrize("text", [" sub", "sub ", "sub\n", "su\0b", ".", "..", "a/..", "./a", "a/"])
def test_field_report_21_a_subpath_is_taken_as_it_is_or_refused(text: str) -> None:
    values = {"type": "volume", "source": "vol", "target": "/data", "subpath": text}
    assert "mounts[0].subpath" in refused({"mounts": [values]})


@pytest.mark.parametrize("text", ["/a/../sandbox", "/a/./b", "/a//b", "//a", "/../a", "/a/.."])
def test_field_report_21_a_target_that_is_not_normalised_is_refused(text: str) -> None:
    assert "mounts[0].target" in refused({"mounts": [{"type": "tmpfs", "target": text}]})


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_field_report_60_numbers_that_json_has_not_are_refused_by_their_path(number: float) -> None:
    values = {"type": "tmpfs", "target": "/a", "size_bytes": number}
    assert "mounts[0].size_bytes" in refused({"mounts": [values]})
    assert "deep.er[0]" in refused({"deep": {"er": [number]}})


@pytest.mark.parametrize(("number", "size_bytes"), [(8080, 8080), (8080.0, 8080), (2.0**53 - 1, 2**53 - 1), (1, 1)])
def test_field_report_61_integral_doubles_are_integers(number: float, size_bytes: int) -> None:
    found = mount(type="tmpfs", target="/a", size_bytes=number)
    assert isinstance(found, TmpfsRequest)
    assert (found.size_bytes, type(found.size_bytes)) == (size_bytes, int)
    assert engine_tmpfs([found])[0].options == f"size={size_bytes}"


def test_field_report_61_minus_zero_is_zero() -> None:
    assert mount(type="tmpfs", target="/a", mode=-0.0) == TmpfsRequest(target="/a", mode=0)


@pytest.mark.parametrize("number", [1.5, 9007199254740993, 2.0**53, -(2.0**53), 1e300, 0.1])
def test_field_report_61_a_number_that_is_no_exact_integer_is_refused(number: float) -> None:
    values = {"type": "tmpfs", "target": "/a", "size_bytes": number}
    assert "mounts[0].size_bytes" in refused({"mounts": [values]})


@pytest.mark.parametrize("taken", CONTROL_PATHS)
def test_no_mount_covers_holds_or_lies_in_what_the_sandbox_needs(taken: str) -> None:
    above = taken.rpartition("/")[0] or "/"
    for target in (taken, f"{taken}/x", above):
        with pytest.raises(InvalidRequestError, match="target"):
            checked_target(target, path="target")


def test_places_beside_the_control_paths_are_free() -> None:
    for target in (
        "/run/openshell-x",
        "/.openshellx",
        "/process",
        "/system",
        "/dev/shm",
        "/run2",
        "/etc/app",
        "/sandbox/data",
        "/home/a",
    ):
        assert checked_target(target, path="target") == target


@pytest.mark.parametrize("target", ["/work", "/work/space"])
def test_a_mount_at_or_above_the_workspace_is_refused(target: str) -> None:
    with pytest.raises(MountError, match="covers the workspace /work/space"):
        check_against_workspace([TmpfsRequest(target=target)], "/work/space")


def test_a_mount_below_or_beside_the_workspace_is_fine() -> None:
    check_against_workspace([TmpfsRequest(target="/work/space/in"), TmpfsRequest(target="/work/spaces")], "/work/space")


@pytest.mark.parametrize(
    "resolved", ["/", "/.openshell/runtime", "/run", "/etc/openshell/x", "/proc/1", "/dev", "/sys"]
)
def test_a_link_that_leads_a_mount_to_a_forbidden_place_is_refused(resolved: str) -> None:
    with pytest.raises(MountError, match="through a symbolic link"):
        check_resolved("/x/y", resolved, workspace="/sandbox")


@pytest.mark.parametrize("resolved", ["/x/y", "/run/lock", "/dev/shm", "/srv/x/y", "/.openshellx"])
def test_a_link_to_a_free_place_is_none_of_our_business(resolved: str) -> None:
    check_resolved("/x/y", resolved, workspace="/sandbox")


@pytest.mark.parametrize(
    ("request_", "enabled", "admission", "api", "word"),
    [
        (BindRequest(source="/s", target="/a"), False, False, NEW, "enable_bind_mounts"),
        (BindRequest(source="/s", target="/a"), True, True, NEW, "resource admission"),
        (ImageRequest(source="x", target="/a"), True, False, NEW, "type image"),
        (VolumeRequest(source="v", target="/a", subpath="x"), False, True, OLD, "whole volume"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(
    request_: MountRequest, enabled: bool, admission: bool, api: tuple[int, int], word: str
) -> None:
    with pytest.raises(DriverError) as error:
        check_offered([request_], enable_bind_mounts=enabled, admission_enabled=admission, api=api)
    assert error.value.status is StatusCode.FAILED_PRECONDITION
    assert word in error.value.message
    assert "mounts[0]" in error.value.message


def test_what_is_offered_passes() -> None:
    check_offered(
        [BindRequest(source="/s", target="/a"), VolumeRequest(source="v", target="/b", subpath="x")],
        enable_bind_mounts=True,
        admission_enabled=False,
        api=NEW,
    )
    check_offered(
        [VolumeRequest(source="v", target="/b"), TmpfsRequest(target="/c")],
        enable_bind_mounts=False,
        admission_enabled=True,
        api=OLD,
    )


@pytest.mark.parametrize(
    ("read_only", "selinux", "expected"),
    [
        (True, None, "/s:/a:ro"),
        (False, None, "/s:/a"),
        (True, SelinuxLabel.SHARED, "/s:/a:ro,z"),
        (False, SelinuxLabel.PRIVATE, "/s:/a:Z"),
    ],
)
def test_field_report_51_bind_mounts_carry_their_selinux_label(
    read_only: bool, selinux: SelinuxLabel | None, expected: str
) -> None:
    assert bind_option(BindRequest(source="/s", target="/a", read_only=read_only, selinux=selinux)) == expected


def test_field_report_51_a_missing_label_is_hinted_at_only_where_selinux_is() -> None:
    labelled = BindRequest(source="/s", target="/labelled", selinux=SelinuxLabel.SHARED)
    mounts: tuple[MountRequest, ...] = (labelled, BindRequest(source="/s", target="/bare"), TmpfsRequest(target="/t"))
    hint = selinux_hint(mounts, selinux=True)
    assert hint is not None
    assert "/bare;" in hint
    assert "selinux_label" in hint
    assert "/labelled" not in hint
    assert selinux_hint(mounts, selinux=False) is None
    assert selinux_hint([labelled], selinux=True) is None


def test_each_kind_goes_to_the_engine_in_its_own_form() -> None:
    mounts: tuple[MountRequest, ...] = (
        BindRequest(source="/s", target="/a"),
        VolumeRequest(source="v", target="/b", read_only=False, subpath="x"),
        TmpfsRequest(target="/c", options=("noexec",), size_bytes=4096, mode=0o1777),
    )
    assert engine_binds(mounts) == ("/s:/a:ro",)
    (volume,) = engine_volumes(mounts)
    assert (volume.volume, volume.target, volume.read_only, volume.subpath) == ("v", "/b", False, "x")
    assert volume.copy_image_content
    assert [(each.target, each.options) for each in engine_tmpfs(mounts)] == [("/c", "noexec,size=4096,mode=1777")]


paths = st.lists(
    st.sampled_from(["a", "..", ".", "", "run", "openshell", " ", "proc", "b\n", ".openshell"]), max_size=5
)


@given(paths.map("/".join) | st.text(max_size=40))
@example("/run/openshell/../x")
@example("/sandbox\u200b")
def test_any_target_is_refused_or_safe_as_it_is(text: str) -> None:
    try:
        target = checked_target(text, path="target")
    except InvalidRequestError as error:
        assert error.message.startswith("target ")
        return
    assert text.rstrip("/") == target
    assert target.startswith("/")
    assert all(part not in {"", ".", ".."} for part in target[1:].split("/"))
    assert not any(overlaps(target, taken) for taken in CONTROL_PATHS)


json = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
keys = st.sampled_from(["type", "source", "target", "read_only", "size_bytes", "mode", "options", "subpath"])
kinds = st.sampled_from(["bind", "volume", "tmpfs", "image", "/a", "vol"])


@given(
    st.dictionaries(st.sampled_from(["mounts", "cdi_devices"]) | st.text(max_size=8), json, max_size=3)
    | st.fixed_dictionaries({"mounts": st.lists(st.dictionaries(keys, json | kinds, max_size=6), max_size=3)})
)
def test_any_struct_is_decoded_or_refused_with_the_same_opening(config: dict[str, Any]) -> None:
    try:
        decode(config)
    except InvalidRequestError as error:
        assert error.message.startswith("invalid docker driver_config: ")


@pytest.mark.parametrize("target", ["/a/" + "x" * 256, "/a/" + "ü" * 128, "/x" * 2048])
def test_a_target_that_no_file_system_can_hold_is_refused(target: str) -> None:
    with pytest.raises(InvalidRequestError, match="bytes"):
        checked_target(target, path="m")
    assert checked_target("/a/" + "x" * 255, path="m")
