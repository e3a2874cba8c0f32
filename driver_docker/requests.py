"""From the wire's `DriverSandbox` to a `LaunchRequest`. Each field is taken or refused by name, none is ignored.

Fields without effect by contract: `status` (an echo), `spec.policy` (the supervisor fetches it), `spec.sandbox_token`
(nothing reads it in the split topology, compute-driver contract 8.2 item 7).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from driver_docker.driver_config import decode_driver_config
from driver_docker.errors import InvalidRequestError, PreconditionError
from driver_docker.gpu import GpuRequest, gpu_request
from driver_docker.identity import MAX_RUN_ID
from driver_docker.quantities import ResourceLimits, parse_limits
from driver_docker.sandbox_ids import is_sandbox_id
from openshell.isolation.documents import DocumentError, LaunchAuthentication, MainProcessSpec
from openshell.isolation.json_fields import dump_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from driver_docker.mounts import MountRequest
    from openshell.wire.compute.v1 import compute_driver_pb2 as pb

PROTECTED_ENVIRONMENT: Final = frozenset(
    {
        "OPENSHELL_ENDPOINT",
        "OPENSHELL_GATEWAY_TLS_SERVER_NAME",
        "OPENSHELL_MAIN_PROCESS_SPEC",
        "OPENSHELL_NETWORK_RUNTIME_CAPABILITIES",
        "OPENSHELL_OCI_IMAGE_USER",
        "OPENSHELL_SANDBOX",
        "OPENSHELL_SANDBOX_GID",
        "OPENSHELL_SANDBOX_ID",
        "OPENSHELL_SANDBOX_TOKEN",
        "OPENSHELL_SANDBOX_TOKEN_FILE",
        "OPENSHELL_SANDBOX_UID",
        "OPENSHELL_SSH_SOCKET_PATH",
        "OPENSHELL_TLS_CA",
        "OPENSHELL_TLS_CERT",
        "OPENSHELL_TLS_KEY",
        "OPENSHELL_USER_ENVIRONMENT",
    }
)
"""Names that a user's environment never reaches the workload with (compute-driver contract 5.6)."""

_MAX_NAME_BYTES: Final = 253
_MAX_LOG_LEVEL_BYTES: Final = 64
_MAX_STRING_BYTES: Final = 128 * 1024 - 1
"""Longest `NAME=value` and longest argument that Linux lets a process start with."""
_MAX_ENVIRONMENT_BYTES: Final = 512 * 1024
"""Of a whole environment as JSON: half of what the documents that carry it may be, so that each can be read again."""
_MAX_LABELS_BYTES: Final = 64 * 1024
_MAIN_PROCESS_VARIABLE: Final = "OPENSHELL_MAIN_PROCESS_SPEC"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """One sandbox as the gateway wants it, checked for shape."""

    sandbox_id: str
    name: str
    """The gateway's name, echoed unchanged in every snapshot."""
    workspace: str
    image: str
    labels: Mapping[str, str]
    child_environment: Mapping[str, str] = field(repr=False)
    """Template's environment under the spec's, without the protected names; may hold the user's secrets."""
    log_level: str
    """Empty: the driver's own."""
    main_process: MainProcessSpec
    user: str
    group: str
    limits: ResourceLimits
    mounts: tuple[MountRequest, ...] = ()
    gpu: GpuRequest | None = None
    driver_config_used: bool = False
    launch: LaunchAuthentication | None = field(default=None, repr=False)


def decode_sandbox(sandbox: pb.DriverSandbox, *, namespace: str, allow_driver_config: bool) -> LaunchRequest:
    """Check and translate a request's sandbox.

    Args:
        sandbox: The wire message; launch credentials may be absent (they are, in Validate).
        namespace: The driver's own namespace.
        allow_driver_config: Whether callers may send a `driver_config` at all.

    Raises:
        InvalidRequestError: Malformed input (compute-driver contract 5.13).
        PreconditionError: Well formed, but not offered by this driver or its configuration.
    """
    if not sandbox.HasField("spec"):
        raise InvalidRequestError("sandbox.spec is missing")
    spec = sandbox.spec
    if not spec.HasField("template"):
        raise InvalidRequestError("sandbox.spec.template is missing")
    template = spec.template
    sandbox_id = check_sandbox_id(sandbox.id)
    _check_name(sandbox.name)
    if sandbox.namespace not in {"", namespace}:
        raise InvalidRequestError(f"sandbox.namespace is {sandbox.namespace!r}, but this driver serves {namespace!r}")
    if len(sandbox.workspace.encode()) > _MAX_NAME_BYTES or not sandbox.workspace.isprintable():
        raise InvalidRequestError(f"sandbox.workspace must be printable and at most {_MAX_NAME_BYTES} bytes")
    if not template.image.strip() or any(char.isspace() for char in template.image):
        raise InvalidRequestError("sandbox.spec.template.image must be an image reference without white space")
    _refuse_unoffered(spec)
    if len(spec.log_level.encode()) > _MAX_LOG_LEVEL_BYTES or not spec.log_level.isprintable():
        raise InvalidRequestError(f"spec.log_level must be printable and at most {_MAX_LOG_LEVEL_BYTES} bytes")
    caller = decode_driver_config(template.driver_config, allow=allow_driver_config)
    resources = template.resources
    return LaunchRequest(
        sandbox_id=sandbox_id,
        name=sandbox.name,
        workspace=sandbox.workspace,
        image=template.image,
        labels=_checked_labels(template.labels),
        child_environment=_child_environment(template.environment, spec.environment),
        log_level=spec.log_level,
        main_process=_main_process(spec),
        user=_selector(spec.workload_identity.user, "user"),
        group=_selector(spec.workload_identity.group, "group"),
        limits=parse_limits(
            cpu_limit=resources.cpu_limit,
            memory_limit=resources.memory_limit,
            cpu_request=resources.cpu_request,
            memory_request=resources.memory_request,
        ),
        mounts=caller.mounts,
        gpu=_gpu(spec, caller.cdi_devices),
        driver_config_used=caller.used,
        launch=decode_launch(spec.launch_authentication) if spec.launch_authentication else None,
    )


def check_sandbox_id(sandbox_id: str) -> str:
    """An id as a path component and a label value.

    Raises:
        InvalidRequestError: Empty, or not `[A-Za-z0-9][A-Za-z0-9_.-]{0,127}`, or the name of a file of the driver.
    """
    if not is_sandbox_id(sandbox_id):
        raise InvalidRequestError(
            "sandbox.id must be 1 to 128 of A-Z a-z 0-9 _ . - and start with a letter or digit; "
            "the driver keeps the name exits.jsonl for itself"
        )
    return sandbox_id


def decode_launch(data: bytes) -> LaunchAuthentication:
    """Parse launch credentials; the error names the member and never quotes a value.

    Raises:
        InvalidRequestError: They do not parse.
    """
    try:
        return LaunchAuthentication.from_json(data)
    except DocumentError as error:
        raise InvalidRequestError(f"launch_authentication cannot be used: {error.message}") from None


def _check_name(name: str) -> None:
    if not name.strip() or len(name.encode()) > _MAX_NAME_BYTES or not name.isprintable():
        raise InvalidRequestError(f"sandbox.name must be 1 to {_MAX_NAME_BYTES} bytes without control characters")


def _refuse_unoffered(spec: pb.DriverSandboxSpec) -> None:
    template = spec.template
    if template.agent_socket_path:
        raise PreconditionError("template.agent_socket_path is not supported by the Docker driver")
    if template.HasField("platform_config") and template.platform_config.fields:
        keys = ", ".join(sorted(template.platform_config.fields))
        raise PreconditionError(f"template.platform_config is not supported by the Docker driver (keys: {keys})")
    if template.HasField("user_namespaces") and template.user_namespaces:
        raise PreconditionError("template.user_namespaces cannot be chosen a sandbox: Docker sets them for all")


def _gpu(spec: pb.DriverSandboxSpec, devices: tuple[str, ...]) -> GpuRequest | None:
    """Presence of the message is the wish; presence of its count is not (compute-driver contract 2.2)."""
    wanted = spec.HasField("resource_requirements") and spec.resource_requirements.HasField("gpu")
    gpu = spec.resource_requirements.gpu
    return gpu_request(wanted=wanted, count=gpu.count if wanted and gpu.HasField("count") else None, devices=devices)


def _checked_labels(labels: Mapping[str, str]) -> dict[str, str]:
    if len(dump_json(dict(labels))) > _MAX_LABELS_BYTES:
        raise InvalidRequestError(f"template.labels are too large: as JSON they may have {_MAX_LABELS_BYTES} bytes")
    for key in labels:
        if not key or "\0" in key or "\0" in labels[key]:
            raise InvalidRequestError("template.labels holds an empty key or a NUL")
    return dict(labels)


def _child_environment(template: Mapping[str, str], spec: Mapping[str, str]) -> dict[str, str]:
    merged = {**template, **spec}
    for name, value in merged.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise InvalidRequestError("environment holds a name that is empty or has '=', or a NUL")
        if len(name.encode()) + len(value.encode()) + 1 > _MAX_STRING_BYTES:
            raise InvalidRequestError(
                f"environment variable {name[:64]!r} is too long: name and value may have {_MAX_STRING_BYTES - 1} bytes"
            )
    environment = {name: value for name, value in sorted(merged.items()) if name not in PROTECTED_ENVIRONMENT}
    if len(dump_json(environment)) > _MAX_ENVIRONMENT_BYTES:
        raise InvalidRequestError(
            f"environment is too large: all names and values together, as JSON, may have {_MAX_ENVIRONMENT_BYTES} bytes"
        )
    return environment


def _main_process(spec: pb.DriverSandboxSpec) -> MainProcessSpec:
    try:
        main_process = MainProcessSpec(
            command=tuple(spec.command),
            tty=spec.tty,
            await_main_process_attachment=spec.await_main_process_attachment,
        )
    except DocumentError as error:
        raise InvalidRequestError(f"spec.command cannot be used: {error.message}") from None
    # It reaches the supervisor as one variable (compute-driver contract 5.7), which a start would refuse later on.
    if len(_MAIN_PROCESS_VARIABLE) + 1 + len(main_process.to_json()) > _MAX_STRING_BYTES:
        raise InvalidRequestError("spec.command is too long: as JSON it must fit one environment variable (128 KiB)")
    return main_process


def _selector(text: str, what: str) -> str:
    if text != text.strip() or not text.isprintable() or ":" in text or len(text.encode()) > _MAX_NAME_BYTES:
        raise InvalidRequestError(
            f"spec.workload_identity.{what} must be a name or number of at most {_MAX_NAME_BYTES} bytes, without white "
            "space or ':'"
        )
    if text.isascii() and text.isdecimal() and int(text) > MAX_RUN_ID:
        raise InvalidRequestError(f"spec.workload_identity.{what} must be at most {MAX_RUN_ID}: engines take no more")
    return text
