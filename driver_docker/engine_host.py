"""What an engine says of the machine it runs on: the facts that a preflight judges. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """The part of `/info` and `/version` that decides whether sandboxes can run there."""

    api_range: str = ""
    """Oldest and newest API version of the engine, for example `1.12 to 1.41`."""
    name: str = ""
    kernel_version: str = ""
    operating_system: str = ""
    os_type: str = "linux"
    architecture: str = ""
    storage_driver: str = ""
    log_drivers: tuple[str, ...] = ()
    cgroup_version: str = ""
    memory_limits: bool = False
    cpu_limits: bool = False
    pids_limits: bool = False
    security_options: tuple[str, ...] = ()
    """Names only: `seccomp`, `apparmor`, `rootless`, `userns`, ..."""
    cdi_spec_dirs: tuple[str, ...] = ()
    live_restore: bool = False


def host_facts(info: Mapping[str, Any], version: Mapping[str, Any] | None = None) -> HostFacts:
    """Decode the answers of `/info` and `/version`; what is missing is taken for absent."""
    plugins = info.get("Plugins") or {}
    newest = str((version or {}).get("ApiVersion") or "")
    oldest = str((version or {}).get("MinAPIVersion") or newest)
    return HostFacts(
        api_range=f"{oldest} to {newest}" if newest else "",
        name=str(info.get("Name") or ""),
        kernel_version=str(info.get("KernelVersion") or ""),
        operating_system=str(info.get("OperatingSystem") or ""),
        os_type=str(info.get("OSType") or "linux"),
        architecture=str(info.get("Architecture") or ""),
        storage_driver=str(info.get("Driver") or ""),
        log_drivers=tuple(str(driver) for driver in plugins.get("Log") or ()),
        cgroup_version=str(info.get("CgroupVersion") or ""),
        memory_limits=bool(info.get("MemoryLimit")),
        cpu_limits=bool(info.get("CpuCfsQuota")),
        pids_limits=bool(info.get("PidsLimit")),
        security_options=tuple(_option_name(str(option)) for option in info.get("SecurityOptions") or ()),
        cdi_spec_dirs=tuple(str(folder) for folder in info.get("CDISpecDirs") or ()),
        live_restore=bool(info.get("LiveRestoreEnabled")),
    )


def _option_name(option: str) -> str:
    """`name=seccomp,profile=default` is about seccomp."""
    first = option.split(",", 1)[0]
    return first.removeprefix("name=")
