"""From a request, the configuration and an image's facts to the two containers of a sandbox. Pure.

The tables of compute-driver contract 5.5 (workload) and 5.7 (supervisor), written out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from driver_docker import isolation_backends, labels, mounts, names, upstream_proxy
from driver_docker.config import Staging
from driver_docker.engine_objects import ContainerSpec, TmpfsMount, VolumeMount, VolumeSpec
from driver_docker.workspace import CHANNEL_DIR, workspace_root

if TYPE_CHECKING:
    from driver_docker.config import DriverConfig
    from driver_docker.engine_objects import ImageFacts
    from driver_docker.requests import LaunchRequest
    from openshell.isolation.documents import WorkloadIdentity

RUNTIME_DIR: Final = "/.openshell/runtime"
RUNTIME_ENTRY: Final = f"{RUNTIME_DIR}/openshell-sandbox"
BOUNDARY_DIR: Final = f"{CHANNEL_DIR}/sandbox"
BOOTSTRAP_PATH: Final = f"{BOUNDARY_DIR}/bootstrap.json"
SERVER_CERTIFICATE_PATH: Final = f"{BOUNDARY_DIR}/server.crt"
SERVER_KEY_PATH: Final = f"{BOUNDARY_DIR}/server.key"
CONTROL_SOCKET_PATH: Final = f"{BOUNDARY_DIR}/control.sock"
SUPERVISOR_DIR: Final = upstream_proxy.SUPERVISOR_DIR
DESCRIPTOR_PATH: Final = f"{SUPERVISOR_DIR}/runtime-descriptor.json"
AUTH_BUNDLE_PATH: Final = f"{SUPERVISOR_DIR}/auth.json"
GATEWAY_CA_PATH: Final = f"{SUPERVISOR_DIR}/tls/ca.pem"
SUPERVISOR_ENTRY: Final = "/openshell-supervisor"
HEALTH_SOCKET_PATH: Final = "/run/openshell/health.sock"
SUPERVISOR_UID: Final = 65534
SUPERVISOR_GID: Final = 65534
SUPERVISOR_CA_DIR: Final = "/run/openshell-supervisor-ca/material"
NETWORK_NONE: Final = "none"
HEALTH_COMMAND: Final = (SUPERVISOR_ENTRY, "health", "--socket", HEALTH_SOCKET_PATH)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedResources:
    """What of the engine's things one launch was given."""

    cdi_devices: tuple[str, ...] = ()
    volume_identities_json: str = "{}"
    """The admitted volumes, as the label of compute-driver contract 5.1 has them."""


NOTHING_CLAIMED: Final = ClaimedResources()


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """What is made for one sandbox; nothing in it is secret."""

    workload: ContainerSpec
    supervisor: ContainerSpec
    channel_volume: VolumeSpec
    supervisor_volume: VolumeSpec
    workspace_root: str
    identity: WorkloadIdentity


def plan_launch(
    request: LaunchRequest,
    *,
    config: DriverConfig,
    owner: labels.Owner,
    image: ImageFacts,
    identity: WorkloadIdentity,
    supervisor_image_id: str,
    runtime_volume: str,
    resources: ClaimedResources = NOTHING_CLAIMED,
) -> LaunchPlan:
    """Translate one launch.

    Args:
        request: The checked request.
        config: The driver's configuration.
        owner: Whose labels the containers carry.
        image: Facts of the workload's image.
        identity: Who the workload runs as.
        supervisor_image_id: ID of the supervisor's image.
        runtime_volume: The volume that holds the sandbox runtime.
        resources: The devices chosen and the volumes admitted for this launch.

    Raises:
        WorkspaceError: The image's working directory cannot be the workspace.
        MountError: A mount covers the workspace.
    """
    root = workspace_root(image.working_dir, image_volumes=image.volumes)
    mounts.check_against_workspace(request.mounts, root)
    volume_labels = labels.volume_labels(owner, sandbox_id=request.sandbox_id, backend=config.backend_name)
    channel = VolumeSpec(
        name=names.channel_volume_name(namespace=owner.namespace, sandbox_id=request.sandbox_id), labels=volume_labels
    )
    files = VolumeSpec(
        name=names.supervisor_volume_name(namespace=owner.namespace, sandbox_id=request.sandbox_id),
        labels=volume_labels,
    )
    workload_name = names.workload_container_name(
        workspace=request.workspace, name=request.name, sandbox_id=request.sandbox_id
    )
    return LaunchPlan(
        workload=_workload(
            request, config, owner, image, identity, workload_name, channel.name, runtime_volume, resources
        ),
        supervisor=plan_supervisor(
            request,
            config=config,
            owner=owner,
            workload_name=workload_name,
            image_id=supervisor_image_id,
            root=root,
            channel_volume=channel.name,
            supervisor_volume=files.name,
        ),
        channel_volume=channel,
        supervisor_volume=files,
        workspace_root=root,
        identity=identity,
    )


def _workload(
    request: LaunchRequest,
    config: DriverConfig,
    owner: labels.Owner,
    image: ImageFacts,
    identity: WorkloadIdentity,
    name: str,
    channel_volume: str,
    runtime_volume: str,
    resources: ClaimedResources,
) -> ContainerSpec:
    own = f"uid={identity.uid},gid={identity.gid}"
    return ContainerSpec(
        name=name,
        image=image.image_id,
        user=f"{identity.uid}:{identity.gid}",
        group_add=tuple(str(gid) for gid in identity.supplementary_gids),
        working_dir="/",
        entrypoint=(RUNTIME_ENTRY,),
        command=("--bootstrap", BOOTSTRAP_PATH),
        environment=_common_environment(request, config),
        labels=labels.container_labels(
            owner,
            role=labels.Role.SANDBOX,
            sandbox_id=request.sandbox_id,
            name=request.name,
            workspace=request.workspace,
            backend=config.backend_name,
            caller_labels=request.labels,
            caller_driver_config_used=request.driver_config_used,
            admission_identities_json=resources.volume_identities_json,
            image_volume_targets=image.volumes,
        ),
        nano_cpus=request.limits.nano_cpus,
        memory_bytes=request.limits.memory_bytes,
        pids_limit=config.sandbox_pids_limit,
        volumes=(
            VolumeMount(volume=channel_volume, target=CHANNEL_DIR),
            VolumeMount(volume=runtime_volume, target=RUNTIME_DIR, read_only=True),
            *mounts.engine_volumes(request.mounts),
        ),
        binds=mounts.engine_binds(request.mounts),
        cdi_devices=resources.cdi_devices,
        cap_drop=("ALL",),
        security_options=("no-new-privileges:true", *_app_armor(config.app_armor_profile)),
        network_mode=NETWORK_NONE,
        dns=("127.0.0.53",),
        dns_search=(".",),
        tmpfs=(
            TmpfsMount(target=SUPERVISOR_CA_DIR, options=f"rw,noexec,nosuid,nodev,size=1m,{own},mode=0755"),
            *mounts.engine_tmpfs(request.mounts),
        ),
        sysctls={"net.ipv4.ip_unprivileged_port_start": "0"},
    )


def plan_supervisor(
    request: LaunchRequest,
    *,
    config: DriverConfig,
    owner: labels.Owner,
    workload_name: str,
    image_id: str,
    root: str,
    channel_volume: str,
    supervisor_volume: str,
) -> ContainerSpec:
    """The supervisor's container; a new one is made for each start (compute-driver contract 5.7).

    Its files volume is mounted writable for lean staging, because the engine takes no archive into a read-only one; the
    files in it belong to root, so the supervisor cannot change them. Upstream's staging goes through another container
    (`plan_staging`), so there the volume is read-only.
    """
    memory = "noexec,nosuid"
    private = f"rw,{memory},size=64m,uid={SUPERVISOR_UID},gid={SUPERVISOR_GID},mode=0700"
    address = config.host_gateway_ip
    hosts = ("host.openshell.internal", "host.docker.internal") if address else ()
    return ContainerSpec(
        name=names.supervisor_container_name(workload_name),
        image=image_id,
        user=f"{SUPERVISOR_UID}:{SUPERVISOR_GID}",
        entrypoint=(SUPERVISOR_ENTRY,),
        command=(
            "--backend-descriptor-file",
            DESCRIPTOR_PATH,
            "--auth-bundle-file",
            AUTH_BUNDLE_PATH,
            "--workdir",
            root,
            f"--health-socket-path={HEALTH_SOCKET_PATH}",
            *isolation_backends.supervisor_arguments(config.delegated_backend),
            *upstream_proxy.proxy_arguments(config),
        ),
        environment=_common_environment(request, config)
        | {
            "OPENSHELL_ADMITTED_ISOLATION_BACKEND": config.backend_name,
            "OPENSHELL_MAIN_PROCESS_SPEC": request.main_process.to_json().decode(),
            "OPENSHELL_ENDPOINT": config.grpc_endpoint,
            "OPENSHELL_SANDBOX_ID": request.sandbox_id,
            "OPENSHELL_SANDBOX": request.name,
            "OPENSHELL_SSH_SOCKET_PATH": config.ssh_socket_path,
            "OPENSHELL_PROXY_TLS_DIR": "/run/openshell/proxy-tls",
            "OPENSHELL_NETWORK_RUNTIME_CAPABILITIES": "policy-dns-transparent-tcp",
        }
        | ({"OPENSHELL_TLS_CA": GATEWAY_CA_PATH} if config.guest_tls_ca else {})
        | upstream_proxy.spiffe_environment(config),
        labels=labels.container_labels(
            owner,
            role=labels.Role.SUPERVISOR,
            sandbox_id=request.sandbox_id,
            name=request.name,
            workspace=request.workspace,
            backend=config.backend_name,
        ),
        network_mode="host",
        extra_hosts=tuple(f"{host}:{address}" for host in hosts),
        volumes=(
            VolumeMount(volume=channel_volume, target=CHANNEL_DIR, read_only=True),
            VolumeMount(volume=supervisor_volume, target=SUPERVISOR_DIR, read_only=config.staging is Staging.UPSTREAM),
        ),
        binds=upstream_proxy.spiffe_binds(config) + isolation_backends.supervisor_binds(config.delegated_backend),
        cap_drop=("ALL",),
        security_options=("no-new-privileges:true",),
        read_only_root=True,
        tmpfs=(
            TmpfsMount(target="/run", options=private),
            TmpfsMount(target="/tmp", options=f"rw,{memory},size=64m,mode=1777"),  # noqa: S108 - inside the container
            TmpfsMount(target="/var/log", options=private),
        ),
    )


def plan_staging(supervisor: ContainerSpec) -> ContainerSpec:
    """The container that is never started and through which a supervisor's files reach their read-only volume.

    Args:
        supervisor: The container that is to read them.
    """
    return ContainerSpec(
        name=f"{supervisor.name}-stage",
        image=supervisor.image,
        user=supervisor.user,
        entrypoint=supervisor.entrypoint,
        labels={**supervisor.labels, labels.ISOLATION_ROLE: labels.Role.STAGING.value},
        network_mode=NETWORK_NONE,
        volumes=tuple(
            replace(mount, read_only=False) for mount in supervisor.volumes if mount.target == SUPERVISOR_DIR
        ),
        cap_drop=("ALL",),
        security_options=("no-new-privileges:true",),
    )


def _common_environment(request: LaunchRequest, config: DriverConfig) -> dict[str, str]:
    return {
        "OPENSHELL_LOG_LEVEL": request.log_level or config.log_level.value,
        "OPENSHELL_TELEMETRY_ENABLED": "true" if config.telemetry_enabled else "false",
    }


def _app_armor(profile: str | None) -> tuple[str, ...]:
    if profile is None or profile == "RuntimeDefault":
        return ()
    return (f"apparmor={profile.removeprefix('Localhost/') if profile != 'Unconfined' else 'unconfined'}",)
