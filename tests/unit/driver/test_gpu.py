"""GPU selection of compute-driver contract 5.2 and 5.12."""

from __future__ import annotations

from pathlib import Path

import pytest

from driver_docker import encode
from driver_docker.config_sources import load_config
from driver_docker.engine_objects import EngineInfo
from driver_docker.engine_wire import engine_info
from driver_docker.errors import DriverError
from driver_docker.gpu import ALL_GPUS, GpuRequest, GpuSelector, gpu_request, inventory
from openshell.status import StatusCode

GPUS = ("nvidia.com/gpu=0", "nvidia.com/gpu=1", "nvidia.com/gpu=2")


def info(*devices: str, cdi: bool = True, wsl2: bool = False) -> EngineInfo:
    return EngineInfo(
        version="28",
        api_version="1.51",
        operating_system="linux",
        architecture="amd64",
        cdi_supported=cdi,
        cdi_devices=devices,
        wsl2=wsl2,
    )


@pytest.mark.parametrize(("wanted", "count", "expected"), [(False, None, None), (True, None, 1), (True, 3, 3)])
def test_field_report_63_presence_of_the_message_and_of_its_count_are_two_things(
    wanted: bool, count: int | None, expected: int | None
) -> None:
    found = gpu_request(wanted=wanted, count=count, devices=())
    assert (found.count if found else None) == expected


@pytest.mark.parametrize(
    ("wanted", "count", "devices", "word"),
    [
        (True, 0, (), "at least 1"),
        (True, 0, ("nvidia.com/gpu=0",), "at least 1"),
        (False, None, ("nvidia.com/gpu=0",), "needs resource_requirements.gpu"),
        (True, None, GPUS[:2], "names 2 devices"),
        (True, 2, GPUS[:1], "names 1 devices"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(
    wanted: bool, count: int | None, devices: tuple[str, ...], word: str
) -> None:
    with pytest.raises(DriverError) as error:
        gpu_request(wanted=wanted, count=count, devices=devices)
    assert error.value.status is StatusCode.INVALID_ARGUMENT
    assert word in error.value.message


@pytest.mark.parametrize(
    ("devices", "wsl2", "expected"),
    [
        ((), False, ()),
        (GPUS, False, GPUS),
        (("nvidia.com/gpu=10", "nvidia.com/gpu=9"), False, ("nvidia.com/gpu=9", "nvidia.com/gpu=10")),
        ((ALL_GPUS, *GPUS), False, GPUS),
        ((ALL_GPUS, *GPUS), True, GPUS),
        ((ALL_GPUS,), False, ()),
        ((ALL_GPUS,), True, (ALL_GPUS,)),
        (("vendor.com/net=eth0", *GPUS[:1]), False, GPUS[:1]),
        (("nvidia.com/gpu=GPU-b", "nvidia.com/gpu=GPU-a"), False, ("nvidia.com/gpu=GPU-a", "nvidia.com/gpu=GPU-b")),
        (("nvidia.com/gpu=GPU-a", "nvidia.com/gpu=0", ALL_GPUS), False, ("nvidia.com/gpu=0",)),
        (("nvidia.com/gpu=0:1", "nvidia.com/gpu=0:0"), False, ("nvidia.com/gpu=0:0", "nvidia.com/gpu=0:1")),
    ],
)
def test_the_inventory_counts_each_card_once(devices: tuple[str, ...], wsl2: bool, expected: tuple[str, ...]) -> None:
    assert inventory(info(*devices, wsl2=wsl2)) == expected


def test_devices_are_given_out_in_turn_and_a_peek_moves_nothing() -> None:
    selector, engine = GpuSelector(), info(*GPUS)
    one, two = GpuRequest(count=1), GpuRequest(count=2)
    assert selector.peek(one, engine) == selector.peek(one, engine) == GPUS[:1]
    assert selector.take(one, engine) == GPUS[:1]
    assert selector.take(two, engine) == GPUS[1:]
    assert selector.take(two, engine) == GPUS[:2]
    assert selector.take(two, engine) == (GPUS[2], GPUS[0])
    assert selector.take(GpuRequest(count=3), engine) == (GPUS[1], GPUS[2], GPUS[0])


def test_the_cursor_survives_an_inventory_that_shrinks() -> None:
    selector = GpuSelector()
    selector.take(GpuRequest(count=2), info(*GPUS))
    assert selector.take(GpuRequest(count=1), info(*GPUS[:2])) == GPUS[:1]


def test_named_devices_are_taken_as_they_are_and_do_not_move_the_cursor() -> None:
    selector, engine = GpuSelector(), info(*GPUS)
    assert selector.take(GpuRequest(count=1, devices=GPUS[2:]), engine) == GPUS[2:]
    assert selector.take(GpuRequest(count=1), engine) == GPUS[:1]
    assert selector.take(GpuRequest(count=1, devices=(ALL_GPUS,)), info()) == (ALL_GPUS,)


def test_the_wsl2_fallback_counts_as_one_device() -> None:
    selector, engine = GpuSelector(), info(ALL_GPUS, wsl2=True)
    assert selector.take(GpuRequest(count=1), engine) == (ALL_GPUS,)
    assert selector.take(GpuRequest(count=1), engine) == (ALL_GPUS,)
    with pytest.raises(DriverError, match="count is 2, but the engine lists 1"):
        selector.peek(GpuRequest(count=2), engine)


@pytest.mark.parametrize(
    ("request_", "engine", "word"),
    [
        (GpuRequest(count=1), info(cdi=False), "no CDI support"),
        (GpuRequest(count=1, devices=GPUS[:1]), info(cdi=False), "no CDI support"),
        (GpuRequest(count=1), info(), "lists 0 GPUs"),
        (GpuRequest(count=4), info(*GPUS), "lists 3 GPUs"),
        (GpuRequest(count=1, devices=("nvidia.com/gpu=7",)), info(*GPUS), "does not know CDI device nvidia.com/gpu=7"),
    ],
)
def test_what_the_engine_does_not_offer_is_refused(request_: GpuRequest, engine: EngineInfo, word: str) -> None:
    with pytest.raises(DriverError) as error:
        GpuSelector().peek(request_, engine)
    assert error.value.status is StatusCode.FAILED_PRECONDITION
    assert word in error.value.message


def test_the_engines_info_tells_devices_and_wsl2() -> None:
    version = {"ApiVersion": "1.51", "MinAPIVersion": "1.24"}
    told = engine_info(
        version,
        {
            "CDISpecDirs": ["/etc/cdi"],
            "DiscoveredDevices": [
                {"Source": "cdi", "ID": "nvidia.com/gpu=1"},
                {"Source": "other", "ID": "nvidia.com/gpu=9"},
                {"Source": "cdi", "ID": "nvidia.com/gpu=0"},
            ],
            "KernelVersion": "5.15.167.4-microsoft-standard-WSL2",
            "SecurityOptions": ["name=seccomp,profile=builtin", "name=selinux"],
        },
        "unix:///x",
    )
    assert (told.cdi_supported, told.cdi_devices, told.wsl2, told.selinux) == (True, GPUS[:2], True, True)
    plain = engine_info(version, {"KernelVersion": "6.1.0", "CDISpecDirs": []}, "unix:///x")
    assert (plain.cdi_supported, plain.cdi_devices, plain.wsl2, plain.selinux) == (False, (), False, False)


@pytest.mark.parametrize("cdi", [False, True])
def test_the_capabilities_say_whether_the_engine_has_cdi(cdi: bool) -> None:
    config = load_config({"bind_socket": Path("/run/d.sock")}, environment={})
    gpu = encode.capabilities(config, info(cdi=cdi)).resource_capabilities.gpu
    assert (gpu.default_selection_supported, gpu.count_selection_supported) == (cdi, cdi)
