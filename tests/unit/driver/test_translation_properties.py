"""Whatever a gateway sends is refused with a fit status, or becomes two containers that keep every promise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from driver_docker.config import load_config
from driver_docker.driver_config import decode_driver_config
from driver_docker.engine import ImageFacts
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

text = st.text(st.characters(codec="utf-8"), max_size=12)
word = st.sampled_from(["agent", "-", "ä", "a b", "1000", "", "x" * 300, "team", "a/b"]) | text
environment = st.dictionaries(
    st.sampled_from([*sorted(PROTECTED_ENVIRONMENT), "PATH", "API_KEY"]) | text, st.just(SECRET) | text, max_size=4
)
labels = st.dictionaries(st.sampled_from([*sorted(RESERVED), "team"]) | text, text, max_size=4)
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


@st.composite
def sandboxes(draw: st.DrawFn) -> pb.DriverSandbox:
    """A sandbox in which anything may be odd, but seldom much of it is."""

    def mostly(usual: str, *odd: str) -> str:
        return draw(st.sampled_from([usual] * 6 + list(odd)))

    message = pb.DriverSandbox(
        id=mostly("7a0f1c2e-0000-4000-8000-000000000001", "sb-1", "", "a/b"),
        name=draw(word),
        workspace=draw(word),
    )
    template = message.spec.template
    template.image = mostly("image:1", "", "a b")
    template.labels.update(draw(labels))
    template.environment.update(draw(environment))
    message.spec.environment.update(draw(environment))
    message.spec.command.extend(draw(st.lists(text, max_size=2)))
    message.spec.log_level = mostly("debug", "", "a\nb")
    message.spec.sandbox_token = SECRET
    template.resources.cpu_limit = mostly("500m", *ODD_QUANTITIES)
    template.resources.memory_limit = mostly("64Mi", *ODD_QUANTITIES)
    template.resources.cpu_request = mostly("", "1")
    if draw(st.booleans()):
        found: list[Any] = draw(st.lists(mount | usual_mount, max_size=3))
        template.driver_config.update({"mounts": found})
    if draw(st.booleans()):
        message.spec.resource_requirements.gpu.count = draw(st.sampled_from([1, 1, 2, 0]))
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
