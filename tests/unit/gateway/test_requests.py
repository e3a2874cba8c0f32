from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import json_format, struct_pb2
from hypothesis import given
from hypothesis import strategies as st

from gateway_embedded import launches, requests
from gateway_embedded.errors import InvalidRequestError, NotBuiltError, PreconditionError, WorkspaceNotFoundError
from openshell.wire.compute.v1 import compute_driver_pb2
from openshell.wire.datamodel.v1.datamodel_pb2 import AllWorkspaces, WorkspaceSelector
from openshell.wire.sandbox.v1 import sandbox_pb2
from openshell.wire.v1 import openshell_pb2 as pb


def spec(**fields: Any) -> pb.SandboxSpec:
    return pb.SandboxSpec(**fields)


def struct(value: dict[str, Any]) -> struct_pb2.Struct:
    return json_format.ParseDict(value, struct_pb2.Struct())


@pytest.mark.parametrize("name", ["a", "a1", "a-b", "0", "a" * 63])
def test_names_that_are_taken(name: str) -> None:
    assert requests.sandbox_name(name) == name


@pytest.mark.parametrize("name", ["", "A", "-a", "a-", "a_b", "a.b", "a" * 64, "ä", "a\n", "a b", "a/b"])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError):
        requests.sandbox_name(name)


def test_generated_names_are_names() -> None:
    names = {requests.sandbox_name(requests.generated_name()) for _ in range(50)}
    assert len(names) == 50


def test_a_workspace_is_never_implied() -> None:
    assert requests.workspace_of(WorkspaceSelector(workspace="default")) == "default"
    for selector in (None, WorkspaceSelector(), WorkspaceSelector(workspace="")):
        with pytest.raises(InvalidRequestError, match="workspace"):
            requests.workspace_of(selector)
    with pytest.raises(InvalidRequestError, match="one workspace"):
        requests.workspace_of(WorkspaceSelector(all_workspaces=AllWorkspaces()))
    with pytest.raises(WorkspaceNotFoundError, match="'other'"):
        requests.workspace_of(WorkspaceSelector(workspace="other"))
    assert requests.workspace_or_all(WorkspaceSelector(all_workspaces=AllWorkspaces())) is None


def test_request_ids() -> None:
    assert requests.request_id("") == ""
    upper = "AAAAAAAA-1111-4111-8111-111111111111"
    assert requests.request_id(upper) == upper.lower()
    for text in ("x", "00000000-0000-0000-0000-000000000000", upper.replace("-", ""), f"{{{upper}}}"):
        with pytest.raises(InvalidRequestError, match="request_id"):
            requests.request_id(text)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"await_main_process_attachment": True}, "await_main_process_attachment"),
        ({"workload_template": "t"}, "workload_template"),
        ({"service_exposures": [pb.SandboxServiceExposure(service="web", target_port=80)]}, "service_exposures"),
        ({"spec": spec(providers=["p"])}, "spec.providers"),
        ({"spec": spec(provider_attachment_epoch="e")}, "spec.provider_attachment_epoch"),
        ({"spec": spec(restart_policy=pb.SANDBOX_RESTART_POLICY_ALWAYS)}, "spec.restart_policy"),
        (
            {
                "spec": spec(
                    policy=sandbox_pb2.SandboxPolicy(
                        network_middlewares={"m": sandbox_pb2.NetworkMiddlewareConfig(name="m")}
                    )
                )
            },
            "spec.policy.network_middlewares",
        ),
        ({"annotations": {"openshell.ai/freeze-policy": "pause"}}, "openshell.ai/freeze-policy"),
        ({"annotations": {"openshell.ai/memory-budget": "1Gi"}}, "openshell.ai/memory-budget"),
    ],
)
def test_what_is_not_built_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    fields.setdefault("spec", spec())
    with pytest.raises(NotBuiltError, match=named):
        requests.check_create(pb.CreateSandboxRequest(**fields))


def test_every_field_of_a_create_request_is_looked_at() -> None:
    """A field that the contract gains must be built or refused, not silently ignored."""
    assert {field.name for field in pb.CreateSandboxRequest.DESCRIPTOR.fields} == {
        "workspace_scope", "spec", "name", "labels", "annotations", "await_main_process_attachment",
        "workload_template", "request_id", "service_exposures",
    }  # fmt: skip
    assert {field.name for field in pb.SandboxSpec.DESCRIPTOR.fields} == {
        "log_level", "environment", "template", "policy", "providers", "resource_requirements", "command", "tty",
        "provider_attachment_epoch", "restart_policy",
    }  # fmt: skip
    assert {field.name for field in pb.SandboxTemplate.DESCRIPTOR.fields} == {
        "image", "runtime_class_name", "agent_socket", "labels", "annotations", "environment", "resources",
        "user_namespaces", "driver_config",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "spec is required"),
        ({"spec": spec(), "name": "Bad Name"}, "not a sandbox name"),
        ({"spec": spec(), "labels": {"bad key": "v"}}, "labels"),
        ({"spec": spec(), "labels": {"k": "bad value"}}, "labels"),
        ({"spec": spec(), "annotations": {"internal.openshell.ai/isolation-backend": "x"}}, "gateway's own"),
        ({"spec": spec(environment={"1A": "v"})}, "malformed name"),
        ({"spec": spec(environment={"A": "v\0"})}, "NUL"),
        ({"spec": spec(template=pb.SandboxTemplate(environment={"": "v"}))}, "malformed name"),
        ({"spec": spec(command=["a\0"])}, "NUL"),
        ({"spec": spec(command=["x" * 300_000])}, "longer than"),
        ({"spec": spec(restart_policy=99)}, "restart_policy"),
        (
            {"spec": spec(resource_requirements=pb.ResourceRequirements(gpu=pb.GpuResourceRequirements(count=0)))},
            "GPU count",
        ),
        (
            {"spec": spec(policy=sandbox_pb2.SandboxPolicy(filesystem=sandbox_pb2.FilesystemPolicy(read_only=["x"])))},
            "absolute",
        ),
        (
            {
                "spec": spec(
                    policy=sandbox_pb2.SandboxPolicy(filesystem=sandbox_pb2.FilesystemPolicy(read_write=["/a/../b"]))
                )
            },
            "absolute",
        ),
        (
            {"spec": spec(policy=sandbox_pb2.SandboxPolicy(process=sandbox_pb2.ProcessPolicy(run_as_user="root")))},
            "without privileges",
        ),
    ],
)
def test_malformed_create_requests(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        requests.check_create(pb.CreateSandboxRequest(**fields))


def driver_input(given: pb.SandboxSpec) -> compute_driver_pb2.DriverSandbox:
    return launches.driver_sandbox(sandbox_id="i", name="n", workspace="default", spec=given, driver_name="docker")


def test_the_driver_gets_what_the_user_asked_for() -> None:
    given = spec(
        log_level="debug",
        environment={"A": "1"},
        command=["run", "it"],
        tty=True,
        template=pb.SandboxTemplate(
            image="demo:1",
            agent_socket="/a.sock",
            labels={"l": "1"},
            environment={"T": "2"},
            user_namespaces=False,
            runtime_class_name="kata",
            annotations={"x": "y"},
            resources=struct(
                {
                    "limits": {"cpu": 2, "memory": "512Mi", "vendor.com/gpu": 1},
                    "requests": {"cpu": "500m", "memory": 1000},
                    "claims": [{"name": "c"}],
                }
            ),
            driver_config=struct({"docker": {"mounts": []}}),
        ),
        policy=sandbox_pb2.SandboxPolicy(process=sandbox_pb2.ProcessPolicy(run_as_user="agent", run_as_group="1000")),
        resource_requirements=pb.ResourceRequirements(gpu=pb.GpuResourceRequirements(count=2)),
    )
    made = driver_input(given)
    assert (made.id, made.name, made.workspace, made.namespace) == ("i", "n", "default", "")
    out = made.spec
    assert (out.log_level, dict(out.environment), list(out.command), out.tty) == (
        "debug", {"A": "1"}, ["run", "it"], True
    )  # fmt: skip
    assert out.policy == given.policy
    assert (out.workload_identity.user, out.workload_identity.group) == ("agent", "1000")
    assert out.resource_requirements.gpu.count == 2
    template = out.template
    assert (template.image, template.agent_socket_path) == ("demo:1", "/a.sock")
    assert (dict(template.labels), dict(template.environment)) == ({"l": "1"}, {"T": "2"})
    assert template.HasField("user_namespaces")
    resources = template.resources
    assert (resources.cpu_limit, resources.memory_limit) == ("2", "512Mi")
    assert (resources.cpu_request, resources.memory_request) == ("500m", "1000")
    assert json_format.MessageToDict(template.platform_config) == {
        "runtime_class_name": "kata",
        "annotations": {"x": "y"},
        "resources_raw": {"limits": {"vendor.com/gpu": 1.0}, "claims": [{"name": "c"}]},
    }
    assert json_format.MessageToDict(template.driver_config) == {"mounts": []}
    assert not out.sandbox_token
    assert not out.launch_authentication


@pytest.mark.parametrize(
    "config",
    [
        {"kubernetes": {"x": 1}},
        {"docker": {"mounts": []}, "kubernetes": {}},
        {"Docker": {"mounts": []}},
        {"": {}},
        {"mounts": []},
    ],
)
def test_a_block_for_another_driver_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="this gateway's compute driver is 'docker'") as caught:
        driver_input(spec(template=pb.SandboxTemplate(image="i", driver_config=struct(config))))
    assert caught.value.field == "spec.template.driver_config"


@pytest.mark.parametrize("level", ["", "trace", "debug", "info", "warn", "warning", "error", "INFO"])
def test_known_log_levels(level: str) -> None:
    requests.check_create(pb.CreateSandboxRequest(spec=spec(log_level=level)))


@pytest.mark.parametrize("level", ["garbage", "info,debug", " info", "inf\no", "0"])
def test_an_unknown_log_level_is_refused(level: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not one of trace, debug, info") as caught:
        requests.check_create(pb.CreateSandboxRequest(spec=spec(log_level=level)))
    assert caught.value.field == "spec.log_level"


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        ({"version": 7}, "policy.version"),
        ({"landlock": {"compatibility": "bogus"}}, "policy.landlock.compatibility"),
        ({"filesystem": {"read_only": ["/usr//lib"]}}, "policy.filesystem.read_only"),
        ({"filesystem": {"read_only": ["/etc/./x"]}}, "policy.filesystem.read_only"),
        ({"filesystem": {"read_only": ["//usr"]}}, "policy.filesystem.read_only"),
        ({"filesystem": {"read_write": ["/a/.."]}}, "policy.filesystem.read_write"),
        ({"filesystem": {"read_write": [""]}}, "policy.filesystem.read_write"),
        ({"process": {"run_as_user": "00"}}, "policy.process.run_as_user"),
        ({"process": {"run_as_user": "0" * 25}}, "policy.process.run_as_user"),
        ({"process": {"run_as_group": "root"}}, "policy.process.run_as_group"),
        ({"process": {"run_as_user": "4294967295"}}, "policy.process.run_as_user"),
        ({"process": {"run_as_user": "9" * 5000}}, "policy.process.run_as_user"),
    ],
)
def test_what_no_boundary_would_take_is_refused_where_its_author_sees_it(policy: dict[str, Any], field: str) -> None:
    given = json_format.ParseDict(policy, sandbox_pb2.SandboxPolicy())
    with pytest.raises(InvalidRequestError) as caught:
        requests.check_create(pb.CreateSandboxRequest(spec=spec(policy=given)))
    assert caught.value.field == field
    with pytest.raises(InvalidRequestError):
        requests.check_write_back(pb.UpdateConfigRequest(policy=given))


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"version": 1, "landlock": {"compatibility": "hard_requirement"}},
        {"landlock": {"compatibility": "best_effort"}, "filesystem": {"read_only": ["/", "/usr/", "/.x/..y"]}},
        {"process": {"run_as_user": "1000", "run_as_group": "agent"}},
        {"process": {"run_as_user": "0" * 20 + "1000"}},
    ],
)
def test_policies_that_are_taken(policy: dict[str, Any]) -> None:
    given = json_format.ParseDict(policy, sandbox_pb2.SandboxPolicy())
    requests.check_create(pb.CreateSandboxRequest(spec=spec(policy=given)))
    requests.check_write_back(pb.UpdateConfigRequest(policy=given))


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"annotations": {"k": "v" * 40_000}}, InvalidRequestError, "annotations"),
        ({"annotations": {"internal.openshell.ai/x": "v"}}, InvalidRequestError, "gateway's own"),
        (
            {
                "policy": sandbox_pb2.SandboxPolicy(
                    network_middlewares={"m": sandbox_pb2.NetworkMiddlewareConfig(name="m")}
                )
            },
            PreconditionError,
            "network_middlewares",
        ),
    ],
)
def test_a_write_back_is_as_strict_as_a_create(fields: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        requests.check_write_back(pb.UpdateConfigRequest(**{"policy": sandbox_pb2.SandboxPolicy(), **fields}))


def test_every_field_of_a_watch_and_a_write_back_is_looked_at() -> None:
    assert {field.name for field in pb.WatchSandboxRequest.DESCRIPTOR.fields} == {
        "workspace_scope", "sandbox", "follow_status", "follow_logs", "follow_events", "log_tail_lines", "event_tail",
        "stop_on_terminal", "resume_after_cursor", "since_time", "log_sources", "log_min_level",
    }  # fmt: skip
    assert {field.name for field in pb.UpdateConfigRequest.DESCRIPTOR.fields} == {
        "workspace_scope", "sandbox", "policy", "expected_resource_version", "annotations", "request_id",
        "setting_key", "setting_value", "delete_setting", "global", "merge_operations",
    }  # fmt: skip
    assert {field.name for field in sandbox_pb2.SandboxPolicy.DESCRIPTOR.fields} == {
        "version", "filesystem", "landlock", "process", "network_policies", "network_middlewares",
    }  # fmt: skip


def test_nothing_is_set_that_was_not_asked_for() -> None:
    out = driver_input(spec(template=pb.SandboxTemplate(image="demo:1"))).spec
    assert not out.template.HasField("resources")
    assert not out.template.HasField("platform_config")
    assert not out.template.HasField("driver_config")
    assert not out.template.HasField("user_namespaces")
    assert not out.HasField("policy")
    assert not out.HasField("resource_requirements")
    assert not out.HasField("workload_identity")


def test_presence_of_an_empty_gpu_request_survives() -> None:
    given = spec(resource_requirements=pb.ResourceRequirements(gpu=pb.GpuResourceRequirements()))
    out = driver_input(given).spec.resource_requirements
    assert out.HasField("gpu")
    assert not out.gpu.HasField("count")


@pytest.mark.parametrize("quantity", ["", "x", "-1", "1 Gi", True, None, float("inf")])
def test_malformed_quantities_are_refused(quantity: Any) -> None:
    resources = struct_pb2.Struct()
    if isinstance(quantity, float):
        resources.fields["limits"].struct_value.fields["cpu"].number_value = quantity
    else:
        resources = struct({"limits": {"cpu": quantity}})
    with pytest.raises(InvalidRequestError, match=r"limits\.cpu"):
        driver_input(spec(template=pb.SandboxTemplate(image="i", resources=resources)))


def test_a_malformed_quantity_is_quoted_within_bounds() -> None:
    for quantity, quoted in (("512Q", "limits.memory '512Q' is not"), ("9" * 5000 + "Q", "9..." + "' is not")):
        given = spec(template=pb.SandboxTemplate(image="i", resources=struct({"limits": {"memory": quantity}})))
        with pytest.raises(InvalidRequestError) as caught:
            driver_input(given)
        assert quoted in caught.value.message
        assert len(caught.value.message) < 256


@given(st.integers(0, 2**53))
def test_whole_numbers_stay_whole(number: int) -> None:
    given = spec(template=pb.SandboxTemplate(image="i", resources=struct({"limits": {"memory": number}})))
    assert driver_input(given).spec.template.resources.memory_limit == str(number)


def test_the_drivers_image_is_the_default() -> None:
    assert launches.resolved_spec(spec(), default_image="d:1").template.image == "d:1"
    given = spec(template=pb.SandboxTemplate(image="mine"))
    assert launches.resolved_spec(given, default_image="d:1").template.image == "mine"
    with pytest.raises(PreconditionError, match="no default image"):
        launches.resolved_spec(spec(), default_image="")
