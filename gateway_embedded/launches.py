"""Translation of a public sandbox into what a compute driver is asked to create (compute-driver contract 2.2)."""

from __future__ import annotations

import re

from google.protobuf import struct_pb2

from gateway_embedded.errors import InvalidRequestError, PreconditionError, public_text
from openshell.wire.compute.v1 import compute_driver_pb2
from openshell.wire.v1 import openshell_pb2

_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|K|M|G|T|Ki|Mi|Gi|Ti)?", re.ASCII)
_SHOWN_BYTES = 64
_QUANTITY_FIELDS = {
    ("requests", "cpu"): "cpu_request",
    ("limits", "cpu"): "cpu_limit",
    ("requests", "memory"): "memory_request",
    ("limits", "memory"): "memory_limit",
}


def resolved_spec(spec: openshell_pb2.SandboxSpec, *, default_image: str) -> openshell_pb2.SandboxSpec:
    """The spec with the driver's default image where the caller named none.

    Raises:
        PreconditionError: Neither the caller nor the driver names an image.
    """
    resolved = openshell_pb2.SandboxSpec()
    resolved.CopyFrom(spec)
    if not resolved.template.image:
        if not default_image:
            raise PreconditionError(
                "the request names no image and the compute driver has no default image; set spec.template.image"
            )
        resolved.template.image = default_image
    return resolved


def driver_sandbox(
    *, sandbox_id: str, name: str, workspace: str, spec: openshell_pb2.SandboxSpec, driver_name: str
) -> compute_driver_pb2.DriverSandbox:
    """The driver's input without credentials, as `ValidateSandboxCreate` gets it.

    Args:
        sandbox_id: The gateway's id of the sandbox.
        name: Its public name.
        workspace: Its workspace.
        spec: The spec with its image resolved.
        driver_name: The configured name; that block of `driver_config` is handed on.

    Raises:
        InvalidRequestError: `resources` or `driver_config` has a member that cannot be handed on.
    """
    template = spec.template
    out = compute_driver_pb2.DriverSandboxTemplate(
        image=template.image,
        agent_socket_path=template.agent_socket,
        labels=template.labels,
        environment=template.environment,
    )
    if template.HasField("user_namespaces"):
        out.user_namespaces = template.user_namespaces
    platform = _platform_config(template, _add_resources(template.resources, out))
    if platform.fields:
        out.platform_config.CopyFrom(platform)
    foreign = sorted(set(template.driver_config.fields) - {driver_name})
    if foreign:
        raise InvalidRequestError(
            f"driver_config has a block for {foreign[0][:80]!r}, but this gateway's compute driver is {driver_name!r}; "
            "name that one or leave the block out",
            field="spec.template.driver_config",
        )
    block = template.driver_config.fields.get(driver_name)
    if block is not None:
        if block.WhichOneof("kind") != "struct_value":
            raise InvalidRequestError(
                f"driver_config.{driver_name} must be an object", field="spec.template.driver_config"
            )
        out.driver_config.CopyFrom(block.struct_value)
    driver_spec = compute_driver_pb2.DriverSandboxSpec(
        log_level=spec.log_level, environment=spec.environment, template=out, command=spec.command, tty=spec.tty
    )
    if spec.HasField("policy"):
        driver_spec.policy.CopyFrom(spec.policy)
        process = spec.policy.process
        if process.run_as_user or process.run_as_group:
            driver_spec.workload_identity.user = process.run_as_user
            driver_spec.workload_identity.group = process.run_as_group
    if spec.HasField("resource_requirements"):
        driver_spec.resource_requirements.SetInParent()
        if spec.resource_requirements.HasField("gpu"):
            driver_spec.resource_requirements.gpu.SetInParent()
            if spec.resource_requirements.gpu.HasField("count"):
                driver_spec.resource_requirements.gpu.count = spec.resource_requirements.gpu.count
    return compute_driver_pb2.DriverSandbox(id=sandbox_id, name=name, workspace=workspace, spec=driver_spec)


def _add_resources(resources: struct_pb2.Struct, out: compute_driver_pb2.DriverSandboxTemplate) -> struct_pb2.Struct:
    """Set the four quantities; returns what else was asked for, which only some drivers understand."""
    rest = struct_pb2.Struct()
    for section, value in resources.fields.items():
        if section not in ("requests", "limits") or value.WhichOneof("kind") != "struct_value":
            rest.fields[section].CopyFrom(value)
            continue
        for resource, quantity in value.struct_value.fields.items():
            field = _QUANTITY_FIELDS.get((section, resource))
            if field is None:
                rest.fields[section].struct_value.fields[resource].CopyFrom(quantity)
                continue
            setattr(out.resources, field, _quantity(f"spec.template.resources.{section}.{resource}", quantity))
    return rest


def _quantity(field: str, value: struct_pb2.Value) -> str:
    kind = value.WhichOneof("kind")
    text = value.string_value
    if kind == "number_value":
        # JSON numbers are doubles; a whole one must not become "2.0".
        number = value.number_value
        text = str(int(number)) if number.is_integer() else repr(number)
    if kind not in ("string_value", "number_value") or not _QUANTITY.fullmatch(text):
        given = f"{public_text(text, limit_bytes=_SHOWN_BYTES)!r} " if kind == "string_value" and text else ""
        raise InvalidRequestError(f"{field} {given}is not a quantity such as '500m' or '512Mi'", field=field)
    return text


def _platform_config(template: openshell_pb2.SandboxTemplate, raw: struct_pb2.Struct) -> struct_pb2.Struct:
    platform = struct_pb2.Struct()
    if template.runtime_class_name:
        platform.fields["runtime_class_name"].string_value = template.runtime_class_name
    for key, value in template.annotations.items():
        platform.fields["annotations"].struct_value.fields[key].string_value = value
    if raw.fields:
        platform.fields["resources_raw"].struct_value.CopyFrom(raw)
    return platform
