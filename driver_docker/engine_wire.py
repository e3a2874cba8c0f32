"""Docker Engine's JSON from and to the driver's own types. Pure."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from driver_docker.engine import EngineError, EngineIncompatibleError
from driver_docker.engine_objects import (
    ContainerFacts,
    ContainerRow,
    ContainerSpec,
    ContainerStatus,
    EngineEvent,
    EngineInfo,
    HealthStatus,
    ImageFacts,
    MountFacts,
    VolumeFacts,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

OLDEST_API: Final = (1, 40)
NEWEST_API: Final = (1, 51)
HEALTH_START_INTERVAL_API: Final = (1, 44)
"""Below this version a health check's start interval is silently ignored by the engine."""

_ZERO_YEAR = 1


def parse_time(text: str | None) -> datetime | None:
    """An engine's timestamp in UTC; its zero time, and anything unreadable, is `None`."""
    if not text:
        return None
    head, dot, rest = text.partition(".")
    if dot:
        digits = "".join(char for char in rest if char.isdecimal())
        zone = rest.lstrip("0123456789")
        offset = zone[1:].replace(":", "") if zone[:1] in "+-" else ""
        digits = digits[: len(digits) - len(offset)] if offset else digits
        text = f"{head}.{digits[:6].ljust(6, '0')}{zone}"
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    if moment.year <= _ZERO_YEAR:
        return None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def engine_info(version: Mapping[str, Any], info: Mapping[str, Any], where: str) -> EngineInfo:
    """Agree on an API version.

    Args:
        version: The answer of `/version`.
        info: The answer of `/info`.
        where: The engine's address, for the error's text.

    Raises:
        EngineIncompatibleError: The ranges do not meet; the text names both.
    """
    try:
        newest = _api(str(version["ApiVersion"]))
        oldest = _api(str(version.get("MinAPIVersion") or version["ApiVersion"]))
    except (KeyError, ValueError) as error:
        raise EngineIncompatibleError(f"what answers at {where} does not name its API version") from error
    chosen = min(newest, NEWEST_API)
    if chosen < max(oldest, OLDEST_API):
        raise EngineIncompatibleError(
            f"the engine at {where} speaks API {_dotted(oldest)} to {_dotted(newest)}, "
            f"this driver {_dotted(OLDEST_API)} to {_dotted(NEWEST_API)}; update the older of the two"
        )
    agreed = EngineInfo(
        version=str(version.get("Version", "unknown")),
        api_version=_dotted(chosen),
        operating_system=str(version.get("Os", "")),
        architecture=str(version.get("Arch", "")),
    )
    return refreshed_info(agreed, info)


def refreshed_info(known: EngineInfo, info: Mapping[str, Any]) -> EngineInfo:
    """What was agreed on, with what `/info` says of devices and confinement now."""
    host = f"{info.get('KernelVersion', '')} {info.get('OperatingSystem', '')}".lower()
    found = info.get("DiscoveredDevices") or ()
    security = [str(option) for option in info.get("SecurityOptions") or ()]
    return replace(
        known,
        cdi_supported=bool(info.get("CDISpecDirs")),
        cdi_devices=tuple(
            sorted({str(device["ID"]) for device in found if device.get("Source") == "cdi" and device.get("ID")})
        ),
        wsl2="microsoft" in host or "wsl2" in host,
        cpus=int(info.get("NCPU") or 0),
        cpu_limits=bool(info.get("CpuCfsQuota", True)),
        memory_limits=bool(info.get("MemoryLimit", True)),
        pids_limits=bool(info.get("PidsLimit", True)),
        selinux=any(option.split(",")[0] == "name=selinux" for option in security),
    )


def _api(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def label_filter(labels: Mapping[str, str]) -> list[str]:
    """The engine's form of a label filter."""
    return [f"{key}={value}" for key, value in sorted(labels.items())]


def image_facts(body: Mapping[str, Any]) -> ImageFacts:
    """Decode an image inspect."""
    config = body.get("Config") or {}
    return ImageFacts(
        image_id=str(body["Id"]),
        user=str(config.get("User") or ""),
        working_dir=str(config.get("WorkingDir") or ""),
        volumes=tuple(sorted(config.get("Volumes") or ())),
        labels=_strings(config.get("Labels")),
        architecture=str(body.get("Architecture") or ""),
        operating_system=str(body.get("Os") or ""),
        tags=tuple(body.get("RepoTags") or ()),
        digests=tuple(body.get("RepoDigests") or ()),
    )


def container_facts(body: Mapping[str, Any]) -> ContainerFacts:
    """Decode a container inspect."""
    state = body.get("State") or {}
    config = body.get("Config") or {}
    host = body.get("HostConfig") or {}
    networks = (body.get("NetworkSettings") or {}).get("Networks") or {}
    health = state.get("Health") or {}
    code = state.get("ExitCode")
    mounts = body.get("Mounts") or ()
    return ContainerFacts(
        container_id=str(body["Id"]),
        name=str(body.get("Name") or "").lstrip("/"),
        image_id=str(body.get("Image") or ""),
        labels=_strings(config.get("Labels")),
        status=ContainerStatus(str(state.get("Status") or "unknown")),
        exit_code=code if isinstance(code, int) else None,
        oom_killed=bool(state.get("OOMKilled")),
        error=str(state.get("Error") or ""),
        created_at=parse_time(body.get("Created")),
        started_at=parse_time(state.get("StartedAt")),
        finished_at=parse_time(state.get("FinishedAt")),
        network_mode=str(host.get("NetworkMode") or ""),
        networks=tuple(sorted(networks)),
        health=HealthStatus(str(health.get("Status") or "none")),
        memory_limit_bytes=int(host.get("Memory") or 0) or None,
        tty=bool(config.get("Tty")),
        volume_names=tuple(sorted(str(mount["Name"]) for mount in mounts if mount.get("Type") == "volume")),
        mounts=tuple(
            MountFacts(
                kind=str(mount.get("Type") or ""),
                name=str(mount.get("Name") or ""),
                source=str(mount.get("Source") or ""),
                target=str(mount.get("Destination") or ""),
                read_only=not mount.get("RW", False),
            )
            for mount in sorted(mounts, key=lambda mount: str(mount.get("Destination") or ""))
        ),
        tmpfs_targets=tuple(sorted(str(target) for target in host.get("Tmpfs") or ())),
    )


def link_target(header: str, what: str) -> str | None:
    """Decode what the engine tells of a path in a container.

    Args:
        header: The value of `X-Docker-Container-Path-Stat`: JSON in base64.
        what: What was asked about, for the error's text.

    Raises:
        EngineError: It cannot be read.
    """
    try:
        stat = json.loads(base64.b64decode(header, validate=True))
        target = str(stat["linkTarget"])
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f"the engine's answer about {what} cannot be read") from error
    return target or None


def container_row(body: Mapping[str, Any]) -> ContainerRow:
    """Decode one row of a container list."""
    names = body.get("Names") or ("",)
    return ContainerRow(
        container_id=str(body["Id"]),
        name=str(names[0]).lstrip("/"),
        image_id=str(body.get("ImageID") or ""),
        labels=_strings(body.get("Labels")),
        status=ContainerStatus(str(body.get("State") or "unknown")),
    )


def volume_facts(body: Mapping[str, Any]) -> VolumeFacts:
    """Decode a volume inspect."""
    return VolumeFacts(
        name=str(body["Name"]),
        driver=str(body.get("Driver") or ""),
        labels=_strings(body.get("Labels")),
        options=_strings(body.get("Options")),
        created_at=parse_time(body.get("CreatedAt")),
        mountpoint=str(body.get("Mountpoint") or ""),
    )


def engine_event(body: Mapping[str, Any]) -> EngineEvent:
    """Decode one event."""
    actor = body.get("Actor") or {}
    nanoseconds = int(body.get("timeNano") or int(body.get("time") or 0) * 1_000_000_000)
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    return EngineEvent(
        kind=str(body.get("Type") or ""),
        action=str(body.get("Action") or "").partition(":")[0],
        object_id=str(actor.get("ID") or body.get("id") or ""),
        attributes=_strings(actor.get("Attributes")),
        time=datetime.fromtimestamp(seconds, tz=UTC).replace(microsecond=rest // 1000),
    )


def container_body(spec: ContainerSpec) -> dict[str, Any]:
    """The create request of a container.

    The log driver is always `json-file`, since other drivers may keep no tail to read; an engine restart policy is
    never set (compute-driver contract 8.2 item 1).
    """
    host: dict[str, Any] = {
        "NetworkMode": spec.network_mode,
        "LogConfig": {"Type": "json-file", "Config": {"max-size": "10m", "max-file": "2"}},
        "RestartPolicy": {"Name": "no"},
        "Mounts": [
            {
                "Type": "volume",
                "Source": mount.volume,
                "Target": mount.target,
                "ReadOnly": mount.read_only,
                "VolumeOptions": {"NoCopy": not mount.copy_image_content}
                | ({"Subpath": mount.subpath} if mount.subpath else {}),
            }
            for mount in spec.volumes
        ],
    }
    optional: dict[str, Any] = {
        "Binds": list(spec.binds),
        "Tmpfs": {mount.target: mount.options for mount in spec.tmpfs},
        "CapDrop": list(spec.cap_drop),
        "SecurityOpt": list(spec.security_options),
        "ReadonlyRootfs": spec.read_only_root,
        "NanoCpus": spec.nano_cpus,
        "Memory": spec.memory_bytes,
        "MemorySwap": spec.memory_bytes,
        "PidsLimit": spec.pids_limit,
        "Dns": list(spec.dns),
        "DnsSearch": list(spec.dns_search),
        "ExtraHosts": list(spec.extra_hosts),
        "Sysctls": dict(spec.sysctls),
        "GroupAdd": list(spec.group_add),
        "DeviceRequests": [{"Driver": "cdi", "DeviceIDs": list(spec.cdi_devices)}] if spec.cdi_devices else [],
    }
    host |= {key: value for key, value in optional.items() if value}
    body: dict[str, Any] = {
        "Image": spec.image,
        "Entrypoint": list(spec.entrypoint) or None,
        "Cmd": list(spec.command) or None,
        "User": spec.user,
        "WorkingDir": spec.working_dir,
        "Env": [f"{key}={value}" for key, value in sorted(spec.environment.items())],
        "Labels": dict(spec.labels),
        "HostConfig": host,
    }
    if spec.health_check is not None:
        check = spec.health_check
        body["Healthcheck"] = {
            "Test": ["CMD", *check.argv],
            "Interval": check.interval_milliseconds * 1_000_000,
            "Timeout": check.timeout_milliseconds * 1_000_000,
            "Retries": check.retries,
            "StartPeriod": check.start_period_milliseconds * 1_000_000,
            "StartInterval": check.start_interval_milliseconds * 1_000_000,
        }
    elif spec.disable_image_health_check:
        body["Healthcheck"] = {"Test": ["NONE"]}
    return body


def _strings(mapping: Mapping[str, Any] | None) -> dict[str, str]:
    return {str(key): str(value) for key, value in (mapping or {}).items()}
