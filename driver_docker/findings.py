"""Judging a machine for this driver: each finding names what was found and, where it is a fault, its cure. Pure."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from driver_docker.compatibility import CompatibilityMode, Outcome, judge
from driver_docker.engine_wire import NEWEST_API, OLDEST_API
from driver_docker.revisions import Component, gateway_revision, image_revision

if TYPE_CHECKING:
    from driver_docker.config import DriverConfig
    from driver_docker.engine_host import HostFacts
    from driver_docker.engine_objects import EngineInfo, ImageFacts

COMPONENT_LABEL: Final = "openshell.ai/component"
VERSION_LABEL: Final = "org.opencontainers.image.version"
MIN_LANDLOCK_ABI: Final = 3
"""What the sandbox runtime needs (compute-driver contract 5.7)."""
_LOG_DRIVER: Final = "json-file"
_VIRTUAL_MACHINES: Final = ("docker desktop", "colima", "orbstack", "rancher desktop", "lima")


class Level(StrEnum):
    """How bad a finding is. Only `FAULT` makes the preflight fail."""

    OK = "ok"
    HINT = "hint"
    FAULT = "fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row of the preflight."""

    check: str
    level: Level
    found: str
    cure: str = ""
    """What to do; empty where nothing is to be done."""


def ok(check: str, found: str) -> Finding:
    """A finding that needs nothing."""
    return Finding(check=check, level=Level.OK, found=found)


def hint(check: str, found: str, cure: str) -> Finding:
    """A finding to know about."""
    return Finding(check=check, level=Level.HINT, found=found, cure=cure)


def fault(check: str, found: str, cure: str) -> Finding:
    """A finding that keeps sandboxes from running."""
    return Finding(check=check, level=Level.FAULT, found=found, cure=cure)


def judge_engine(info: EngineInfo, host: HostFacts) -> list[Finding]:
    """The engine itself: version, limits, logs, storage, namespaces."""
    ours = f"{_dotted(OLDEST_API)} to {_dotted(NEWEST_API)}"
    theirs = f"Docker {info.version} speaks {host.api_range or info.api_version}"
    findings = [ok("engine API", f"{info.api_version} agreed on: {theirs}, this driver {ours}")]
    if host.os_type != "linux":
        findings.append(fault("containers", f"{host.os_type} containers", "switch the engine to Linux containers"))
    findings.append(_log_driver(host))
    findings.append(_storage(host))
    findings.append(_limits(host))
    findings.append(_namespaces(host))
    findings.append(_seccomp_profile(host))
    if "selinux" in host.security_options:
        findings.append(
            hint(
                "SELinux",
                "the engine labels containers: a folder of the host is denied unless it is relabelled",
                "give bind mounts selinux_label = shared or private",
            )
        )
    if host.cdi_spec_dirs:
        findings.append(ok("GPUs (CDI)", f"device specifications in {', '.join(host.cdi_spec_dirs)}"))
    else:
        findings.append(
            hint(
                "GPUs (CDI)", "not offered by the engine", "for GPUs: a CDI-capable engine and nvidia-ctk cdi generate"
            )
        )
    return findings


def _log_driver(host: HostFacts) -> Finding:
    if not host.log_drivers or _LOG_DRIVER in host.log_drivers:
        return ok("log driver", f"{_LOG_DRIVER} is available; containers are given it whatever the engine's default")
    return fault(
        "log driver",
        f"{_LOG_DRIVER} is not available",
        f"enable the {_LOG_DRIVER} log driver: last words are read by it",
    )


def _storage(host: HostFacts) -> Finding:
    if host.storage_driver == "vfs":
        return hint("storage driver", "vfs copies every image for every container", "use overlay2")
    return ok("storage driver", host.storage_driver or "not told")


def _limits(host: HostFacts) -> Finding:
    missing = [
        name
        for name, there in (("memory", host.memory_limits), ("CPU", host.cpu_limits), ("pids", host.pids_limits))
        if not there
    ]
    if missing:
        return fault(
            "resource limits",
            f"the engine cannot limit {', '.join(missing)} (cgroup v{host.cgroup_version or '?'})",
            "enable these cgroup controllers, for a rootless engine by systemd delegation: "
            "this driver promises hard limits",
        )
    return ok("resource limits", f"memory, CPU and pids are limited (cgroup v{host.cgroup_version or '1'})")


def _namespaces(host: HostFacts) -> Finding:
    if "userns" in host.security_options:
        return fault(
            "user namespaces",
            "the engine remaps users, and then refuses the host network that supervisors need",
            "run the engine without userns-remap, or give this driver an engine of its own",
        )
    if "rootless" in host.security_options:
        return hint(
            "user namespaces",
            "the engine is rootless: the host network of a supervisor is that of its network namespace",
            "set grpc_endpoint to an address that is reachable from there (see slirp4netns --disable-host-loopback)",
        )
    return ok("user namespaces", "neither rootless nor remapped")


def _seccomp_profile(host: HostFacts) -> Finding:
    if "seccomp" in host.security_options:
        return ok("seccomp profile", "the engine applies one")
    return fault("seccomp profile", "the engine applies none", "use an engine and kernel with seccomp support")


def judge_kernel(*, is_local: bool, landlock_abi: int | None, seccomp_actions: tuple[str, ...]) -> list[Finding]:
    """What the sandbox runtime needs of the kernel; known only where the engine runs on this machine.

    Args:
        is_local: Whether the engine runs on this machine's kernel.
        landlock_abi: The kernel's Landlock ABI; `None` where it has none.
        seccomp_actions: The kernel's seccomp actions.
    """
    if not is_local:
        return [
            hint(
                "kernel",
                "the engine runs on another machine",
                f"there: Landlock ABI {MIN_LANDLOCK_ABI} or newer (Linux 6.2) and seccomp user notification",
            )
        ]
    findings = []
    if landlock_abi is None:
        findings.append(
            fault("Landlock", "not available", "boot a kernel 6.2 or newer with landlock in its lsm= parameter")
        )
    elif landlock_abi < MIN_LANDLOCK_ABI:
        findings.append(
            fault("Landlock", f"ABI {landlock_abi}, {MIN_LANDLOCK_ABI} is needed", "boot Linux 6.2 or newer")
        )
    else:
        findings.append(ok("Landlock", f"ABI {landlock_abi}"))
    if "user_notif" in seccomp_actions:
        findings.append(ok("seccomp", "user notification is available"))
    else:
        findings.append(
            fault("seccomp", "no user notification", "boot a kernel with CONFIG_SECCOMP_FILTER, 5.9 or newer")
        )
    return findings


def judge_image(check: str, reference: str, facts: ImageFacts | None, *, may_pull: bool, component: str) -> Finding:
    """One configured image.

    Args:
        check: The row's name.
        reference: What is configured.
        facts: The image on the engine, if it is there.
        may_pull: Whether the pull policy lets the driver fetch it.
        component: The `openshell.ai/component` that the image must carry if it carries one; empty for a workload.
    """
    if facts is None:
        if may_pull:
            return hint(
                check, f"{reference} is not here yet", f"it is pulled when needed; now: docker pull {reference}"
            )
        return fault(
            check, f"{reference} is not here", f"docker pull {reference}, or change image_pull_policy = 'never'"
        )
    told = facts.labels.get(COMPONENT_LABEL, "")
    if component and told and told != component:
        return fault(check, f"{reference} is an image of component {told}, not {component}", "name the right image")
    version = facts.labels.get(VERSION_LABEL, "")
    words = [reference, facts.image_id.removeprefix("sha256:")[:12]]
    if version:
        words.append(f"version {version}")
    elif component:
        return hint(check, f"{' '.join(words)}, without {VERSION_LABEL}", "its revision is taken from its tag")
    return ok(check, " ".join(words))


def judge_revisions(config: DriverConfig, *, supervisor: ImageFacts | None, runtime: ImageFacts | None) -> Finding:
    """Whether the two images fit together; the gateway is not known before it has shaken hands.

    Args:
        config: The configuration.
        supervisor: The supervisor's image on the engine, if it is there.
        runtime: The sandbox runtime's image on the engine, if it is there.
    """
    ours = image_revision(Component.SUPERVISOR, config.supervisor_image, supervisor)
    theirs = image_revision(Component.RUNTIME, config.sandbox_runtime_image, runtime)
    found = judge(gateway_revision(None), ours, theirs)
    if not found.refused:
        return ok("revisions", "nothing speaks against the two images; the gateway is judged when it shakes hands")
    enforced = config.compatibility is CompatibilityMode.ENFORCE
    # A gateway that says the very same may still fit to images of a revision that cannot be compared.
    settled = found.outcome is Outcome.UNSUPPORTED or not ours.same(theirs)
    return (fault if enforced and settled else hint)("revisions", found.message, "name images of one release")


def judge_endpoint(config: DriverConfig, host: HostFacts | None, *, is_local: bool, listening: bool | None) -> Finding:
    """Where supervisors reach the gateway: they share the network of the machine that the engine runs on.

    Args:
        config: The configuration.
        host: The engine's machine, where the engine answers.
        is_local: Whether that is this machine.
        listening: Whether somebody listens at the endpoint, as seen from here; `None` where that says nothing.
    """
    endpoint = config.grpc_endpoint
    name = urlsplit(endpoint).hostname or ""
    loopback = is_loopback(name)
    if is_wildcard(name):
        return fault(
            "grpc_endpoint", f"{endpoint} is no address to connect to", "name 127.0.0.1 or the gateway's address"
        )
    if loopback and host is not None:
        machine = f"{host.operating_system} {host.name}".lower()
        if not is_local or any(word in machine for word in _VIRTUAL_MACHINES):
            return fault(
                "grpc_endpoint",
                f"to a supervisor {endpoint} is the engine's machine ({host.name}), which is not this one",
                "set grpc_endpoint to an address of the gateway that the engine's machine reaches, with https",
            )
    if not loopback and urlsplit(endpoint).scheme == "http":
        return fault(
            "grpc_endpoint",
            f"{endpoint} leaves this machine unencrypted, with the sandboxes' tokens",
            "use https and guest_tls_ca, or a loopback address",
        )
    if listening is False:
        return hint("grpc_endpoint", f"nobody listens at {endpoint}", "start the gateway, or correct grpc_endpoint")
    return ok("grpc_endpoint", endpoint)


def is_loopback(host: str) -> bool:
    """Whether a host is certainly this machine; names other than localhost, and odd spellings, are not."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def is_wildcard(host: str) -> bool:
    """Whether a host is a wildcard address, which is never a place to connect to."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
