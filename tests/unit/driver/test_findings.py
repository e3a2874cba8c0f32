"""The preflight's judgements: each fault is named with its cure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from driver_docker.config import DriverConfig
from driver_docker.config_sources import load_config
from driver_docker.engine_host import HostFacts, host_facts
from driver_docker.engine_objects import EngineInfo, ImageFacts
from driver_docker.findings import (
    Finding,
    Level,
    is_loopback,
    judge_endpoint,
    judge_engine,
    judge_image,
    judge_kernel,
    judge_revisions,
)

INFO = EngineInfo(version="20.10.24", api_version="1.41", operating_system="linux", architecture="amd64")
GOOD = HostFacts(
    name="here",
    storage_driver="overlay2",
    log_drivers=("json-file", "local"),
    cgroup_version="2",
    memory_limits=True,
    cpu_limits=True,
    pids_limits=True,
    security_options=("seccomp", "cgroupns"),
    cdi_spec_dirs=("/etc/cdi",),
)


def config(**values: Any) -> DriverConfig:
    return load_config({"bind_socket": Path("/run/x/d.sock")} | values, environment={})


def not_ok(findings: list[Finding]) -> list[tuple[str, Level]]:
    return [(finding.check, finding.level) for finding in findings if finding.level is not Level.OK]


def test_a_good_engine_has_no_faults_and_every_finding_but_ok_has_a_cure() -> None:
    assert not_ok(judge_engine(INFO, GOOD)) == []
    bad = HostFacts(storage_driver="vfs", log_drivers=("syslog",), os_type="windows", security_options=("userns",))
    for finding in judge_engine(INFO, bad):
        assert (finding.cure == "") is (finding.level is Level.OK)


@pytest.mark.parametrize(
    ("change", "check", "level"),
    [
        ({"os_type": "windows"}, "containers", Level.FAULT),
        ({"log_drivers": ("syslog",)}, "log driver", Level.FAULT),
        ({"storage_driver": "vfs"}, "storage driver", Level.HINT),
        ({"memory_limits": False}, "resource limits", Level.FAULT),
        ({"cpu_limits": False}, "resource limits", Level.FAULT),
        ({"pids_limits": False}, "resource limits", Level.FAULT),
        ({"security_options": ("seccomp", "userns")}, "user namespaces", Level.FAULT),
        ({"security_options": ("seccomp", "rootless")}, "user namespaces", Level.HINT),
        ({"security_options": ()}, "seccomp profile", Level.FAULT),
        ({"cdi_spec_dirs": ()}, "GPUs (CDI)", Level.HINT),
        ({"security_options": ("seccomp", "selinux")}, "SELinux", Level.HINT),
    ],
)
def test_field_report_18_each_fault_of_a_host_is_its_own_finding(
    change: dict[str, Any], check: str, level: Level
) -> None:
    assert not_ok(judge_engine(INFO, replace(GOOD, **change))) == [(check, level)]


def test_field_report_44_both_ranges_are_told() -> None:
    version = {"ApiVersion": "1.41", "MinAPIVersion": "1.12"}
    found = judge_engine(INFO, host_facts({}, version))[0].found
    assert found == "1.41 agreed on: Docker 20.10.24 speaks 1.12 to 1.41, this driver 1.40 to 1.51"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"is_local": True, "landlock_abi": 7, "seccomp_actions": ("kill", "user_notif")}, []),
        ({"is_local": True, "landlock_abi": 2, "seccomp_actions": ("user_notif",)}, [("Landlock", Level.FAULT)]),
        ({"is_local": True, "landlock_abi": None, "seccomp_actions": ("user_notif",)}, [("Landlock", Level.FAULT)]),
        ({"is_local": True, "landlock_abi": 3, "seccomp_actions": ("kill",)}, [("seccomp", Level.FAULT)]),
        ({"is_local": False, "landlock_abi": None, "seccomp_actions": ()}, [("kernel", Level.HINT)]),
    ],
)
def test_the_kernel_is_judged_only_where_the_engine_runs_on_it(values: dict[str, Any], expected: list[Any]) -> None:
    assert not_ok(judge_kernel(**values)) == expected


@pytest.mark.parametrize(
    ("labels", "here", "may_pull", "level"),
    [
        ({"openshell.ai/component": "supervisor", "org.opencontainers.image.version": "1"}, True, True, Level.OK),
        ({"openshell.ai/component": "runtime", "org.opencontainers.image.version": "1"}, True, True, Level.FAULT),
        ({}, True, True, Level.HINT),
        ({}, False, True, Level.HINT),
        ({}, False, False, Level.FAULT),
    ],
)
def test_images(labels: dict[str, str], here: bool, may_pull: bool, level: Level) -> None:
    facts = ImageFacts(image_id="sha256:abc", labels=labels) if here else None
    finding = judge_image("supervisor_image", "r:1", facts, may_pull=may_pull, component="supervisor")
    assert finding.level is level
    assert "r:1" in finding.found


@pytest.mark.parametrize(
    ("supervisor", "runtime", "mode", "level"),
    [
        ("0.1.5", "0.1.5", "enforce", Level.OK),
        ("0.1.5", "0.1.4", "enforce", Level.FAULT),
        ("0.1.5", "0.1.4", "warn", Level.HINT),
        ("latest", "latest", "enforce", Level.FAULT),
        ("latest", "latest", "warn", Level.HINT),
        ("0.1.5", None, "enforce", Level.OK),
    ],
)
def test_images_that_do_not_fit_together_are_a_fault(
    supervisor: str, runtime: str | None, mode: str, level: Level
) -> None:
    found = judge_revisions(
        config(
            supervisor_image=f"r/supervisor:{supervisor}",
            sandbox_runtime_image=f"r/runtime:{runtime or 'x'}",
            compatibility=mode,
        ),
        supervisor=ImageFacts(image_id="sha256:a"),
        runtime=ImageFacts(image_id="sha256:b") if runtime else None,
    )
    assert found.level is level


def test_images_of_one_unreadable_revision_may_still_fit_the_gateway() -> None:
    facts = ImageFacts(image_id="sha256:a", labels={"org.opencontainers.image.version": "m-dev"})
    assert judge_revisions(config(), supervisor=facts, runtime=facts).level is Level.HINT


@pytest.mark.parametrize(
    ("endpoint", "host", "is_local", "listening", "level"),
    [
        ("http://127.0.0.1:1", GOOD, True, True, Level.OK),
        ("http://127.0.0.1:1", GOOD, True, False, Level.HINT),
        ("http://[::1]:1", GOOD, True, True, Level.OK),
        ("http://0.0.0.0:1", GOOD, True, True, Level.FAULT),
        ("http://[::]:1", GOOD, True, True, Level.FAULT),
        ("http://10.0.0.7:1", GOOD, True, True, Level.FAULT),
        ("http://127.0.0.1:1", GOOD, False, None, Level.FAULT),
        ("http://127.0.0.1:1", replace(GOOD, operating_system="Docker Desktop"), True, True, Level.FAULT),
        ("http://127.0.0.1:1", replace(GOOD, name="colima"), True, True, Level.FAULT),
        ("http://127.0.0.1:1", replace(GOOD, name="orbstack"), True, True, Level.FAULT),
    ],
)
def test_field_report_17_where_supervisors_reach_the_gateway(
    endpoint: str, host: HostFacts, is_local: bool, listening: bool | None, level: Level
) -> None:
    finding = judge_endpoint(config(grpc_endpoint=endpoint), host, is_local=is_local, listening=listening)
    assert finding.level is level


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("LOCALHOST", True),
        ("127.0.0.1", True),
        ("127.0.0.2", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("127.1", False),
        ("2130706433", False),
        ("0x7f000001", False),
        ("0177.0.0.1", False),
        ("127.attacker.com", False),
        ("\uff11\uff12\uff17.0.0.1", False),
        ("ⓛocalhost", False),
        ("localhost.", False),
    ],
)
def test_field_report_66_67_loopback_is_decided_by_addresses(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_an_engines_answer_is_decoded_and_gaps_mean_absent() -> None:
    assert host_facts({}) == HostFacts()
    facts = host_facts(
        {
            "SecurityOptions": ["name=seccomp,profile=default", "name=rootless"],
            "Plugins": {"Log": ["json-file"]},
            "CDISpecDirs": None,
            "MemoryLimit": True,
        }
    )
    assert facts.security_options == ("seccomp", "rootless")
    assert (facts.log_drivers, facts.cdi_spec_dirs, facts.memory_limits) == (("json-file",), (), True)
