"""Whatever a gateway sends is refused with a fit status, or becomes two containers that keep every promise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from driver_docker.config_sources import load_config
from driver_docker.driver_config import decode_driver_config
from driver_docker.engine_objects import ImageFacts
from driver_docker.engine_wire import container_body
from driver_docker.errors import STATUS_TEXT_LIMIT_BYTES, DriverError, ProvisioningError
from driver_docker.labels import RESERVED, Owner
from driver_docker.mounts import CONTROL_PATHS
from driver_docker.plan import plan_launch
from driver_docker.requests import PROTECTED_ENVIRONMENT, decode_sandbox
from driver_docker.workspace import overlaps
from openshell.isolation.documents import IdentitySource, WorkloadIdentity
from openshell.status import StatusCode
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

CONFIG = load_config({"bind_socket": Path("/run/d.sock"), "allow_driver_config": True}, environment={})
OWNER = Owner(namespace="default", driver="d1")
IDENTITY = WorkloadIdentity(uid=1200, gid=1300, source=IdentitySource.IMAGE, resource_digest="sha256:w")
SECRET = "s3cr3t-value-0001"

printable = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S"]), min_size=1, max_size=12)
odd_text = st.text(st.characters(codec="utf-8"), max_size=12)
ODD_WORDS = ("-", "ä", "a b", "1000", "", "x" * 300, "a/b", "a\nb", "\0")
environment = st.dictionaries(
    st.sampled_from([*sorted(PROTECTED_ENVIRONMENT), "PATH", "API_KEY", "ä"]), st.just(SECRET) | printable, max_size=4
)
labels = st.dictionaries(st.sampled_from([*sorted(RESERVED), "team"]) | printable, printable, max_size=4)
path = st.sampled_from(
    [
        "/data",
        "/sandbox",
        "/sandbox/x",
        "/run",
        "/proc/1",
        "/.openshell/runtime",
        "/etc",
        "/dev/shm",
        " /a",
        "/a/../b",
        "/",
    ]
)
mount = st.fixed_dictionaries(
    {"type": st.sampled_from(["bind", "volume", "tmpfs", "image", "x"]), "target": path},
    optional={
        "source": st.sampled_from(["vol", "/srv", "../x", "openshell-channel-1"]),
        "read_only": st.booleans(),
        "size_bytes": st.floats() | st.integers(-1, 2**54),
        "mode": st.integers(0, 5000),
        "selinux_label": st.sampled_from(["shared", "private", "Z"]),
        "subpath": st.sampled_from(["a", "a/..", "/a"]),
        "options": st.lists(st.sampled_from(["noexec", "size=1m", "bind", "uid=0"]), max_size=2),
    },
)
usual_mount = st.sampled_from(
    [
        {"type": "volume", "source": "cache", "target": "/cache"},
        {"type": "bind", "source": "/srv", "target": "/srv", "selinux_label": "shared"},
        {"type": "tmpfs", "target": "/sandbox/tmp", "size_bytes": 4096},
        {"type": "tmpfs", "target": "/data"},
    ]
)
ODD_QUANTITIES = ("", "1", "0", "0.4", " 1")


ODDITIES: dict[str, st.SearchStrategy[Any]] = {
    "nothing": st.none(),
    "nothing at all": st.none(),
    "id": st.sampled_from(["sb-1", "", "a/b"]),
    "name": st.sampled_from(ODD_WORDS),
    "workspace": st.sampled_from(ODD_WORDS),
    "image": st.sampled_from(["", "a b"]),
    "log_level": st.sampled_from(["", "a\nb"]),
    "cpu_limit": st.sampled_from(ODD_QUANTITIES),
    "memory_limit": st.sampled_from(ODD_QUANTITIES),
    "cpu_request": st.just("1"),
    "label": st.tuples(odd_text, odd_text),
    "environment": st.tuples(odd_text, odd_text),
    "command": odd_text,
    "mount": mount,
    "gpus": st.sampled_from([0, 1, 2]),
}


@st.composite
def sandboxes(draw: st.DrawFn) -> pb.DriverSandbox:
    """A sandbox in which one thing may be odd."""
    kind = draw(st.sampled_from(sorted(ODDITIES)))
    odd = draw(ODDITIES[kind])

    def either(key: str, usual: str) -> str:
        return str(odd) if kind == key else usual

    message = pb.DriverSandbox(
        id=either("id", "7a0f1c2e-0000-4000-8000-000000000001"),
        name=either("name", "agent"),
        workspace=either("workspace", "team"),
    )
    template = message.spec.template
    template.image = either("image", "image:1")
    template.labels.update(draw(labels))
    template.environment.update(draw(environment))
    template.resources.cpu_limit = either("cpu_limit", "500m")
    template.resources.memory_limit = either("memory_limit", "64Mi")
    template.resources.cpu_request = either("cpu_request", "")
    message.spec.environment.update(draw(environment))
    message.spec.command.extend(draw(st.lists(printable, max_size=2)))
    message.spec.log_level = either("log_level", "debug")
    message.spec.sandbox_token = SECRET
    if kind == "label":
        template.labels[odd[0]] = odd[1]
    elif kind == "environment":
        message.spec.environment[odd[0]] = odd[1]
    elif kind == "command":
        message.spec.command.append(odd)
    elif kind == "gpus":
        message.spec.resource_requirements.gpu.count = odd
    mounts: list[Any] = draw(st.lists(usual_mount, max_size=3, unique_by=lambda each: str(each["target"])))
    template.driver_config.update({"mounts": [*mounts, odd] if kind == "mount" else mounts})
    return message


def fit(error: DriverError) -> None:
    assert error.status in {StatusCode.INVALID_ARGUMENT, StatusCode.FAILED_PRECONDITION}
    said = error.public_message
    assert said
    assert said.isprintable()
    assert len(said.encode()) <= STATUS_TEXT_LIMIT_BYTES
    assert SECRET not in said


@settings(max_examples=400, deadline=None)
@given(
    sandboxes(),
    st.sampled_from(["", "/", "/work", "/sandbox/x/deep", "/data/work"]),
    st.lists(st.sampled_from(["/image-data", "/work", "/.openshell/x"]), max_size=1),
)
def test_any_sandbox_is_refused_fitly_or_planned_safely(
    message: pb.DriverSandbox, working_dir: str, volumes: list[str]
) -> None:
    try:
        request = decode_sandbox(message, namespace="default", allow_driver_config=True)
    except DriverError as error:
        fit(error)
        return
    assert not set(request.child_environment) & PROTECTED_ENVIRONMENT
    assert SECRET not in repr(request)
    image = ImageFacts(image_id="sha256:w", working_dir=working_dir, volumes=tuple(volumes))
    try:
        plan = plan_launch(
            request,
            config=CONFIG,
            owner=OWNER,
            image=image,
            identity=IDENTITY,
            supervisor_image_id="sha256:s",
            runtime_volume="openshell-runtime-1",
        )
    except ProvisioningError as error:
        fit(error)
        assert error.reason == "WorkspaceValidationFailed"
        return
    _check(container_body(plan.workload), request.mounts, plan.workspace_root)
    for spec in (plan.workload, plan.supervisor):
        body = container_body(spec)
        shown = json.dumps(body)
        assert SECRET not in json.dumps({key: value for key, value in body.items() if key != "Labels"})
        assert re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+", spec.name)
        assert body["HostConfig"]["CapDrop"] == ["ALL"]
        assert "no-new-privileges:true" in body["HostConfig"]["SecurityOpt"]
        assert body["HostConfig"]["RestartPolicy"] == {"Name": "no"}
        assert "Privileged" not in shown
        assert spec.labels["openshell.ai/sandbox-id"] == message.id
        assert spec.labels["openshell.ai/driver-owner"] == "d1"


def _check(body: dict[str, Any], wanted: Any, root: str) -> None:
    host = body["HostConfig"]
    assert host["NetworkMode"] == "none"
    assert {entry.split("=")[0] for entry in body["Env"]} == {"OPENSHELL_LOG_LEVEL", "OPENSHELL_TELEMETRY_ENABLED"}
    places = [bind.split(":")[1] for bind in host.get("Binds", [])]
    places += [each["Target"] for each in host["Mounts"][2:]]
    places += [place for place in host["Tmpfs"] if place != "/run/openshell-supervisor-ca/material"]
    assert sorted(places) == sorted(each.target for each in wanted if type(each).__name__ != "ImageRequest")
    for place in places:
        assert not any(overlaps(place, taken) for taken in CONTROL_PATHS)
        assert not (root == place or root.startswith(f"{place}/"))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_that_parse_are_refused_or_decoded(data: bytes) -> None:
    try:
        message = pb.DriverSandbox.FromString(data)
    except ValueError:
        return
    except Exception as error:  # protobuf's own error is no ValueError in every implementation
        assert type(error).__name__ == "DecodeError"
        return
    try:
        decode_sandbox(message, namespace="default", allow_driver_config=True)
        decode_driver_config(message.spec.template.driver_config, allow=True)
    except DriverError as error:
        fit(error)
