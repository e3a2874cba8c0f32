"""From the driver's own types to the wire's messages. Pure."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final

from driver_docker import older_generation
from driver_docker.capabilities import (
    IMPLEMENTATION_NAME,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    REQUIRED_CAPABILITIES,
    Peer,
    admission_acknowledgement,
    offered_capabilities,
)
from driver_docker.errors import public_text
from driver_docker.events import EVENT_SOURCE, Deleted, PlatformEvent, Snapshot, WatchEvent
from openshell.wire.compute.v1 import compute_driver_pb2 as pb
from openshell.wire.extension.v1 import extension_pb2

if TYPE_CHECKING:
    from driver_docker.config import DriverConfig
    from driver_docker.engine_objects import EngineInfo


DISTRIBUTION: Final = "openshell-docker"


def own_version() -> str:
    """The version of this driver, as installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "0.0.0+unknown"


def capabilities(config: DriverConfig, engine: EngineInfo | None = None) -> pb.GetCapabilitiesResponse:
    """The driver's answer to the handshake; the same for the same configuration and engine, always.

    Args:
        config: The driver's configuration.
        engine: What the engine said when it was connected: without CDI specifications no GPU is ever placed, and a
            limit that its kernel does not enforce is not promised. `None` stands for one that enforces all limits.
    """
    cpu, memory = engine is None or engine.cpu_limits, engine is None or engine.memory_limits
    gpus = engine is not None and engine.cdi_supported
    return pb.GetCapabilitiesResponse(
        driver_name="docker",
        driver_version=own_version(),
        default_image=config.default_image,
        gateway_manages_lifecycle=config.gateway_manages_lifecycle,
        supports_sandbox_authentication=False,
        driver_reports_runtime_readiness=False,
        resource_capabilities=pb.ResourceCapabilities(
            cpu=pb.CpuResourceCapabilities(limit_supported=cpu),
            memory=pb.MemoryResourceCapabilities(limit_supported=memory),
            gpu=pb.GpuResourceCapabilities(default_selection_supported=gpus, count_selection_supported=gpus),
        ),
        extension=extension_pb2.PeerMetadata(
            protocol_version=extension_pb2.ProtocolVersion(major=PROTOCOL_MAJOR, minor=PROTOCOL_MINOR),
            implementation_name=IMPLEMENTATION_NAME,
            implementation_version=own_version(),
            supported_capabilities=offered_capabilities(engine),
            required_capabilities=REQUIRED_CAPABILITIES,
        ),
        resource_admission_policy=admission_acknowledgement(
            allow_driver_config=config.allow_driver_config, admission=config.resource_admission
        ),
    )


def peer(message: extension_pb2.PeerMetadata) -> Peer:
    """A peer's metadata as it arrived."""
    return Peer(
        name=message.implementation_name,
        version=message.implementation_version,
        protocol_major=message.protocol_version.major,
        protocol_minor=message.protocol_version.minor,
        supported=tuple(message.supported_capabilities),
        required=tuple(message.required_capabilities),
    )


def sandbox(snapshot: Snapshot, *, older_gateway: bool = False) -> pb.DriverSandbox:
    """A snapshot as an observation: no spec, and the gateway's own name (compute-driver contract 2.2).

    Args:
        snapshot: What was observed.
        older_gateway: Whether times are also sent in the fields of the older generation.
    """
    message = pb.DriverSandbox(
        id=snapshot.sandbox_id,
        name=snapshot.name,
        namespace=snapshot.namespace,
        workspace=snapshot.workspace,
        status=pb.DriverSandboxStatus(
            name=snapshot.container_name, instance_id=snapshot.container_id, deleting=snapshot.deleting
        ),
    )
    for condition in snapshot.conditions:
        entry = message.status.conditions.add(
            type=condition.type,
            status=condition.status.value,
            reason=condition.reason,
            message=public_text(condition.message),
        )
        entry.transition_time.FromDatetime(condition.transition_time)
        if older_gateway:
            older_generation.add_transition_time(entry, condition.transition_time)
    return message


def watch_event(event: WatchEvent, *, older_gateway: bool = False) -> pb.WatchSandboxesEvent:
    """One event of the watch stream; `older_gateway` as in `sandbox`."""
    if isinstance(event, Snapshot):
        observed = sandbox(event, older_gateway=older_gateway)
        return pb.WatchSandboxesEvent(sandbox=pb.WatchSandboxesSandboxEvent(sandbox=observed))
    if isinstance(event, Deleted):
        return pb.WatchSandboxesEvent(deleted=pb.WatchSandboxesDeletedEvent(sandbox_id=event.sandbox_id))
    return pb.WatchSandboxesEvent(platform_event=_platform_event(event, older_gateway=older_gateway))


def _platform_event(event: PlatformEvent, *, older_gateway: bool) -> pb.WatchSandboxesPlatformEvent:
    message = pb.WatchSandboxesPlatformEvent(
        sandbox_id=event.sandbox_id,
        event=pb.DriverPlatformEvent(
            source=EVENT_SOURCE,
            type=event.type.value,
            reason=event.reason,
            message=public_text(event.message),
            metadata=event.metadata,
        ),
    )
    message.event.event_time.FromDatetime(event.time)
    if older_gateway:
        older_generation.add_timestamp_milliseconds(message.event, event.time)
    return message
