"""From the wire to a launch request: each field is taken or refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from scripted.compute_gateway import SECRET, sandbox

from driver_docker.errors import DriverError, InvalidRequestError
from driver_docker.requests import PROTECTED_ENVIRONMENT, LaunchRequest, decode_sandbox
from openshell.status import StatusCode
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

INVALID, PRECONDITION = StatusCode.INVALID_ARGUMENT, StatusCode.FAILED_PRECONDITION


def decode(message: pb.DriverSandbox, *, allow: bool = False) -> LaunchRequest:
    return decode_sandbox(message, namespace="default", allow_driver_config=allow)


def test_what_is_offered_is_taken() -> None:
    wanted = sandbox("image:1", name="My Sandbox", labels={"team": "a"}, environment={"A": "1", "B": "1"})
    wanted.spec.environment.update({"B": "2", "C": "3"})
    wanted.spec.command.extend(["/bin/x", "a b"])
    wanted.spec.tty = True
    wanted.spec.log_level = "debug"
    wanted.spec.await_main_process_attachment = True
    wanted.spec.workload_identity.user = "agent"
    wanted.spec.workload_identity.group = "1300"
    wanted.spec.template.resources.cpu_limit = "1.5"
    wanted.spec.template.resources.memory_limit = "1Gi"
    wanted.spec.template.user_namespaces = False
    request = decode(wanted)
    assert (request.sandbox_id, request.name, request.workspace) == (wanted.id, "My Sandbox", "default")
    assert request.child_environment == {"A": "1", "B": "2", "C": "3"}
    assert (request.user, request.group, request.log_level) == ("agent", "1300", "debug")
    assert (request.limits.nano_cpus, request.limits.memory_bytes) == (1_500_000_000, 2**30)
    spec = request.main_process
    assert (spec.command, spec.tty, spec.await_main_process_attachment) == (("/bin/x", "a b"), True, True)
    assert request.launch is not None
    assert request.launch.supervisor.runtime_generation == "g-1"
    assert SECRET not in repr(request)


def test_protected_names_never_reach_the_workload() -> None:
    wanted = sandbox("image:1", environment=dict.fromkeys(PROTECTED_ENVIRONMENT, "x"))
    wanted.spec.environment.update(dict.fromkeys(PROTECTED_ENVIRONMENT, "y"))
    assert decode(wanted).child_environment == {}
    assert len(PROTECTED_ENVIRONMENT) == 16


def test_validate_needs_no_credentials() -> None:
    wanted = sandbox("image:1")
    wanted.spec.ClearField("launch_authentication")
    assert decode(wanted).launch is None


def _set(path: str, value: Any) -> Callable[[pb.DriverSandbox], None]:
    def change(message: pb.DriverSandbox) -> None:
        *parents, last = path.split(".")
        target: Any = message
        for parent in parents:
            target = getattr(target, parent)
        if isinstance(value, dict):
            getattr(target, last).update(value)
        else:
            setattr(target, last, value)

    return change


@pytest.mark.parametrize(
    ("change", "status", "word"),
    [
        (lambda m: m.ClearField("spec"), INVALID, "sandbox.spec "),
        (lambda m: m.spec.ClearField("template"), INVALID, "template"),
        (_set("id", ""), INVALID, "sandbox.id"),
        (_set("id", "a/../b"), INVALID, "sandbox.id"),
        (_set("id", ".hidden"), INVALID, "sandbox.id"),
        (_set("id", "x" * 129), INVALID, "sandbox.id"),
        (_set("name", ""), INVALID, "sandbox.name"),
        (_set("name", "a\nb"), INVALID, "sandbox.name"),
        (_set("name", "ä" * 127), INVALID, "sandbox.name"),
        (_set("namespace", "other"), INVALID, "sandbox.namespace"),
        (_set("workspace", "a\0b"), INVALID, "sandbox.workspace"),
        (_set("spec.template.image", ""), INVALID, "image"),
        (_set("spec.template.image", "a b"), INVALID, "image"),
        (_set("spec.template.agent_socket_path", "/x"), PRECONDITION, "agent_socket_path"),
        (_set("spec.template.platform_config", {"runtime_class_name": "x"}), PRECONDITION, "runtime_class_name"),
        (_set("spec.template.user_namespaces", True), PRECONDITION, "user_namespaces"),
        (_set("spec.template.driver_config", {"mounts": []}), PRECONDITION, "allow_driver_config"),
        (_set("spec.template.resources.cpu_request", "1"), PRECONDITION, "cpu_request"),
        (_set("spec.template.resources.memory_request", "1Gi"), PRECONDITION, "memory_request"),
        (_set("spec.template.resources.memory_limit", "0.4"), PRECONDITION, "memory_limit"),
        (_set("spec.template.resources.cpu_limit", "nonsense"), PRECONDITION, "cpu_limit"),
        (_set("spec.resource_requirements.gpu.count", 0), INVALID, "gpu.count"),
        (_set("spec.log_level", "x" * 65), INVALID, "log_level"),
        (_set("spec.log_level", "in\nfo"), INVALID, "log_level"),
        (_set("spec.environment", {"": "x"}), INVALID, "environment"),
        (_set("spec.environment", {"A=B": "x"}), INVALID, "environment"),
        (_set("spec.environment", {"A": "x\0y"}), INVALID, "environment"),
        (lambda m: m.spec.command.append(""), INVALID, "command"),
        (_set("spec.workload_identity.user", "a:b"), INVALID, "user"),
        (_set("spec.workload_identity.group", " x"), INVALID, "group"),
        (_set("spec.workload_identity.user", "2147483648"), INVALID, "at most 2147483647"),
        (_set("spec.workload_identity.group", "4294967294"), INVALID, "at most 2147483647"),
        (_set("spec.workload_identity.group", "x" * 254), INVALID, "group"),
        (_set("spec.launch_authentication", b"{}"), INVALID, "launch_authentication"),
        (_set("spec.launch_authentication", b"\xff"), INVALID, "launch_authentication"),
    ],
)
def test_what_is_wrong_or_not_offered_is_refused_by_name(
    change: Callable[[pb.DriverSandbox], None], status: StatusCode, word: str
) -> None:
    wanted = sandbox("image:1")
    change(wanted)
    with pytest.raises(DriverError) as refused:
        decode(wanted)
    assert refused.value.status is status
    assert word in refused.value.message


@pytest.mark.parametrize(
    ("config", "status", "word"),
    [
        ({"volumes": []}, INVALID, "invalid docker driver_config: unknown key volumes"),
        ({"mounts": "x"}, INVALID, "invalid docker driver_config: mounts must be a list"),
        ({"mounts": [{"size_bytes": float("nan")}]}, INVALID, "invalid docker driver_config: mounts[0].size_bytes"),
        ({"mounts": [{"size_bytes": 2.0**60}]}, INVALID, "invalid docker driver_config: mounts[0].size_bytes"),
        ({"mounts": [{"type": "tmpfs"}]}, INVALID, "invalid docker driver_config: mounts[0].target is missing"),
        ({"cdi_devices": ["nvidia.com/gpu=0"]}, INVALID, "driver_config.cdi_devices needs resource_requirements.gpu"),
    ],
)
def test_an_allowed_driver_config_is_still_checked(config: dict[str, Any], status: StatusCode, word: str) -> None:
    wanted = sandbox("image:1")
    wanted.spec.template.driver_config.update(config)
    with pytest.raises(DriverError) as refused:
        decode(wanted, allow=True)
    assert refused.value.status is status
    assert word in refused.value.message


def test_what_linux_could_not_start_is_refused_at_once() -> None:
    longest = 128 * 1024 - 1
    wanted = sandbox("image:1")
    wanted.spec.environment["A"] = "x" * (longest - 2)
    assert len(decode(wanted).child_environment["A"]) == longest - 2
    wanted.spec.environment["A"] = "x" * (longest - 1)
    with pytest.raises(InvalidRequestError, match="environment variable 'A' is too long"):
        decode(wanted)
    wanted = sandbox("image:1")
    wanted.spec.command.extend(["/bin/x", "y" * (128 * 1024 - 256)])
    decode(wanted)
    wanted.spec.command.append("z" * 256)
    with pytest.raises(InvalidRequestError, match=r"spec\.command is too long"):
        decode(wanted)


def test_an_environment_that_a_start_could_not_read_again_is_refused_at_once() -> None:
    wanted = sandbox("image:1")
    wanted.spec.environment.update({f"V{number}": "ü" * 50_000 for number in range(4)})
    assert len(decode(wanted).child_environment) == 4  # 400 kB as text and as JSON
    wanted.spec.environment.update({f"W{number}": "x" * 100_000 for number in range(2)})
    with pytest.raises(InvalidRequestError, match="environment is too large"):
        decode(wanted)
    wanted = sandbox("image:1")
    wanted.spec.environment.update({f"V{number}": "\x01" * 30_000 for number in range(4)})  # six bytes each in JSON
    with pytest.raises(InvalidRequestError, match="environment is too large"):
        decode(wanted)
    wanted = sandbox("image:1", environment={"OPENSHELL_TLS_KEY": "x" * 100_000})
    assert decode(wanted).child_environment == {}


def test_labels_are_bounded_since_every_list_of_containers_holds_them() -> None:
    longest = {"team": "ü" * (32 * 1024 - 6)}
    assert decode(sandbox("image:1", labels=longest)).labels == longest
    with pytest.raises(InvalidRequestError, match=r"template\.labels are too large"):
        decode(sandbox("image:1", labels=longest | {"more": "1"}))
    with pytest.raises(InvalidRequestError, match=r"template\.labels are too large"):
        decode(sandbox("image:1", labels={f"key-{number}": "" for number in range(10_000)}))


@pytest.mark.parametrize(("count", "expected"), [(None, None), (0, None), (2, 2)])
def test_field_report_63_an_absent_count_is_one_and_a_zero_is_an_error(count: int | None, expected: int | None) -> None:
    wanted = sandbox("image:1")
    assert decode(wanted).gpu is None
    wanted.spec.resource_requirements.SetInParent()
    assert decode(wanted).gpu is None
    wanted.spec.resource_requirements.gpu.SetInParent()
    asked = decode(wanted).gpu
    assert asked is not None
    assert asked.count == 1
    if count is not None:
        wanted.spec.resource_requirements.gpu.count = count
        if expected is None:
            with pytest.raises(InvalidRequestError, match=r"gpu\.count must be at least 1"):
                decode(wanted)
        else:
            found = decode(wanted).gpu
            assert found is not None
            assert found.count == expected


def test_field_report_63_fields_of_a_newer_gateway_are_ignored() -> None:
    wanted = sandbox("image:1")
    newer = pb.DriverSandbox.FromString(wanted.SerializeToString() + bytes([0xFA, 0x07, 0x01, 0x78]))
    assert decode(newer) == decode(wanted)


def test_fields_without_effect_by_contract_are_accepted() -> None:
    wanted = sandbox("image:1")
    wanted.spec.sandbox_token = "x"
    wanted.status.name = "echo"
    wanted.spec.policy.SetInParent()
    decode(wanted)
