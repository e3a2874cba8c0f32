"""The two containers of a sandbox, against the tables of compute-driver contract 5.5 and 5.7."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from scripted.compute_gateway import SECRET, sandbox

from driver_docker.config_sources import load_config
from driver_docker.engine_objects import ContainerSpec, ImageFacts
from driver_docker.engine_wire import container_body
from driver_docker.labels import Owner
from driver_docker.mounts import MountError
from driver_docker.names import staging_container_name
from driver_docker.plan import ClaimedResources, LaunchPlan, plan_launch, plan_staging
from driver_docker.requests import decode_sandbox
from openshell.isolation.documents import IdentitySource, WorkloadIdentity

if TYPE_CHECKING:
    from openshell.wire.compute.v1 import compute_driver_pb2 as pb

IDENTITY = WorkloadIdentity(
    uid=1200, gid=1300, supplementary_gids=(1400,), source=IdentitySource.IMAGE, resource_digest="sha256:w"
)
IMAGE = ImageFacts(image_id="sha256:w", working_dir="/app", volumes=("/data",))


def plan(
    message: pb.DriverSandbox | None = None, *, resources: ClaimedResources | None = None, **config: Any
) -> LaunchPlan:
    request = decode_sandbox(message or wanted(), namespace="default", allow_driver_config=True)
    return plan_launch(
        request,
        config=load_config({"bind_socket": Path("/run/x/d.sock")} | config, environment={}),
        owner=Owner(namespace="default", driver="d1"),
        image=IMAGE,
        identity=IDENTITY,
        supervisor_image_id="sha256:s",
        runtime_volume="openshell-runtime-1",
        resources=resources or ClaimedResources(),
    )


def wanted(**template: Any) -> pb.DriverSandbox:
    message = sandbox("image:1", name="demo", **template)
    message.id = "7a0f1c2e-0000-4000-8000-000000000001"
    return message


def test_the_workload_container_is_that_of_the_contract() -> None:
    message = wanted(labels={"team": "a"})
    message.spec.template.resources.memory_limit = "64Mi"
    message.spec.template.resources.cpu_limit = "500m"
    body = container_body(plan(message).workload)
    labels = body.pop("Labels")
    assert labels["team"] == "a"
    assert labels["openshell.ai/isolation-role"] == "sandbox"
    assert labels["openshell.ai/private-image-volume-targets"] == '["/data"]'
    mounts = body["HostConfig"].pop("Mounts")
    assert [(m["Target"], m["ReadOnly"], m["VolumeOptions"]["NoCopy"]) for m in mounts] == [
        ("/.openshell/channel", False, True),
        ("/.openshell/runtime", True, True),
    ]
    assert body == {
        "Image": "sha256:w",
        "Entrypoint": ["/.openshell/runtime/openshell-sandbox"],
        "Cmd": ["--bootstrap", "/.openshell/channel/sandbox/bootstrap.json"],
        "User": "1200:1300",
        "WorkingDir": "/",
        "Env": ["OPENSHELL_LOG_LEVEL=info", "OPENSHELL_TELEMETRY_ENABLED=false"],
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": {
            "NetworkMode": "none",
            "LogConfig": {"Type": "json-file", "Config": {"max-size": "10m", "max-file": "2"}},
            "RestartPolicy": {"Name": "no"},
            "Tmpfs": {
                "/run/openshell-supervisor-ca/material": ("rw,noexec,nosuid,nodev,size=1m,uid=1200,gid=1300,mode=0755")
            },
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges:true"],
            "NanoCpus": 500_000_000,
            "Memory": 64 * 2**20,
            "MemorySwap": 64 * 2**20,
            "PidsLimit": 2048,
            "Dns": ["127.0.0.53"],
            "DnsSearch": ["."],
            "Sysctls": {"net.ipv4.ip_unprivileged_port_start": "0"},
            "GroupAdd": ["1400"],
        },
    }


def test_the_supervisor_container_is_that_of_the_contract() -> None:
    message = wanted()
    message.spec.command.append("/bin/true")
    body = container_body(plan(message, grpc_endpoint="http://127.0.0.1:4711").supervisor)
    assert body.pop("Labels")["openshell.ai/isolation-role"] == "supervisor"
    mounts = body["HostConfig"].pop("Mounts")
    assert [(m["Target"], m["ReadOnly"]) for m in mounts] == [
        ("/.openshell/channel", True),
        ("/.openshell/supervisor", False),
    ]
    private = "rw,noexec,nosuid,size=64m,uid=65534,gid=65534,mode=0700"
    assert body == {
        "Image": "sha256:s",
        "Entrypoint": ["/openshell-supervisor"],
        "Cmd": [
            "--backend-descriptor-file",
            "/.openshell/supervisor/runtime-descriptor.json",
            "--auth-bundle-file",
            "/.openshell/supervisor/auth.json",
            "--workdir",
            "/app",
            "--health-socket-path=/run/openshell/health.sock",
        ],
        "User": "65534:65534",
        "WorkingDir": "",
        "Env": [
            "OPENSHELL_ADMITTED_ISOLATION_BACKEND=openshell-sandbox",
            "OPENSHELL_ENDPOINT=http://127.0.0.1:4711",
            "OPENSHELL_LOG_LEVEL=info",
            (
                'OPENSHELL_MAIN_PROCESS_SPEC={"version":1,"command":["/bin/true"],"tty":false,'
                '"await_main_process_attachment":false}'
            ),
            "OPENSHELL_NETWORK_RUNTIME_CAPABILITIES=policy-dns-transparent-tcp",
            "OPENSHELL_PROXY_TLS_DIR=/run/openshell/proxy-tls",
            "OPENSHELL_SANDBOX=demo",
            "OPENSHELL_SANDBOX_ID=7a0f1c2e-0000-4000-8000-000000000001",
            "OPENSHELL_SSH_SOCKET_PATH=/run/openshell/ssh.sock",
            "OPENSHELL_TELEMETRY_ENABLED=false",
        ],
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": {
            "NetworkMode": "host",
            "LogConfig": {"Type": "json-file", "Config": {"max-size": "10m", "max-file": "2"}},
            "RestartPolicy": {"Name": "no"},
            "Tmpfs": {"/run": private, "/tmp": "rw,noexec,nosuid,size=64m,mode=1777", "/var/log": private},
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges:true"],
            "ReadonlyRootfs": True,
            "ExtraHosts": ["host.openshell.internal:127.0.0.1", "host.docker.internal:127.0.0.1"],
        },
    }


def test_nothing_secret_is_in_a_plan() -> None:
    message = wanted()
    message.spec.environment["API_KEY"] = "user-secret"
    message.spec.sandbox_token = "sandbox-secret"
    text = str(plan(message))
    assert SECRET not in text
    assert "user-secret" not in text
    assert "sandbox-secret" not in text


def test_names_without_an_address_get_no_extra_hosts() -> None:
    assert plan(grpc_endpoint="http://gateway.example:1").supervisor.extra_hosts == ()


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        (None, ("no-new-privileges:true",)),
        ("RuntimeDefault", ("no-new-privileges:true",)),
        ("Unconfined", ("no-new-privileges:true", "apparmor=unconfined")),
        ("Localhost/agents", ("no-new-privileges:true", "apparmor=agents")),
    ],
)
def test_app_armor_profiles_become_options(profile: str | None, expected: tuple[str, ...]) -> None:
    assert plan(app_armor_profile=profile).workload.security_options == expected


def test_a_container_that_says_nothing_gets_no_limits_and_no_health_check_of_its_image() -> None:
    body = container_body(ContainerSpec(name="x", image="sha256:1"))
    assert body["Healthcheck"] == {"Test": ["NONE"]}
    assert set(body["HostConfig"]) == {"NetworkMode", "LogConfig", "RestartPolicy", "Mounts"}


def test_mounts_devices_and_admissions_of_the_caller_join_the_drivers_own() -> None:
    message = wanted()
    message.spec.template.driver_config.update(
        {
            "mounts": [
                {"type": "bind", "source": "/srv/in", "target": "/in", "selinux_label": "private"},
                {"type": "volume", "source": "cache", "target": "/app/cache", "read_only": False},
                {"type": "tmpfs", "target": "/scratch", "size_bytes": 4096},
            ],
            "cdi_devices": ["nvidia.com/gpu=1"],
        }
    )
    message.spec.resource_requirements.gpu.SetInParent()
    claimed = ClaimedResources(cdi_devices=("nvidia.com/gpu=1",), volume_identities_json='{"cache":{}}')
    body = container_body(plan(message, resources=claimed).workload)
    host = body["HostConfig"]
    assert host["Binds"] == ["/srv/in:/in:ro,Z"]
    assert host["DeviceRequests"] == [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=1"]}]
    assert host["Mounts"][2:] == [
        {
            "Type": "volume",
            "Source": "cache",
            "Target": "/app/cache",
            "ReadOnly": False,
            "VolumeOptions": {"NoCopy": False},
        }
    ]
    assert list(host["Tmpfs"]) == ["/run/openshell-supervisor-ca/material", "/scratch"]
    assert host["Tmpfs"]["/scratch"] == "size=4096"
    assert body["Labels"]["openshell.ai/caller-driver-config-used"] == "true"
    assert body["Labels"]["openshell.ai/resource-admission-identities"] == '{"cache":{}}'


def test_a_mount_over_the_images_workspace_is_no_plan() -> None:
    message = wanted()
    message.spec.template.driver_config.update({"mounts": [{"type": "tmpfs", "target": "/app"}]})
    with pytest.raises(MountError, match="covers the workspace /app"):
        plan(message)


def test_the_operators_network_reaches_the_supervisor_alone() -> None:
    made = plan(
        https_proxy="https://proxy:1",
        proxy_auth_file="/etc/acme/auth",
        provider_spiffe_workload_api_socket="/run/spire/agent.sock",
        grpc_endpoint="https://127.0.0.1:1",
        guest_tls_ca="/etc/acme/ca.pem",
    )
    body = container_body(made.supervisor)
    assert body["Cmd"][7:] == [
        "--upstream-proxy",
        "https://proxy:1",
        "--upstream-proxy-auth-file",
        "/.openshell/supervisor/upstream-proxy-auth",
    ]
    assert "OPENSHELL_PROVIDER_SPIFFE_WORKLOAD_API_SOCKET=/run/spire/agent.sock" in body["Env"]
    assert "OPENSHELL_TLS_CA=/.openshell/supervisor/tls/ca.pem" in body["Env"]
    assert body["HostConfig"]["Binds"] == ["/run/spire:/run/spire:ro"]
    workload = container_body(made.workload)
    assert "Binds" not in workload["HostConfig"]
    assert "spire" not in str(workload)
    assert "proxy" not in str(workload)


def test_upstreams_staging_goes_through_a_container_that_never_starts() -> None:
    supervisor = plan(staging="upstream", https_proxy="https://proxy:1").supervisor
    mounts = {mount.target: mount.read_only for mount in supervisor.volumes}
    assert mounts == {"/.openshell/channel": True, "/.openshell/supervisor": True}
    body = container_body(plan_staging(supervisor))
    labels = body.pop("Labels")
    assert labels == {**supervisor.labels, "openshell.ai/isolation-role": "staging"}
    (mount,) = body["HostConfig"].pop("Mounts")
    assert (mount["Target"], mount["ReadOnly"]) == ("/.openshell/supervisor", False)
    assert (body["User"], body["Image"], body["Cmd"], body["Env"]) == ("65534:65534", "sha256:s", None, [])
    assert body["HostConfig"]["NetworkMode"] == "none"
    assert plan_staging(supervisor).name == staging_container_name(plan().workload.name)
