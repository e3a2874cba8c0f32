"""Launch inputs: what is accepted, and the exact words of what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from openshell.isolation.documents import (
    BackendRegistration,
    BoundaryLaunch,
    IsolationBackends,
    UnixTransport,
)
from openshell.verdicts import Category, Stage
from supervisor_reference.errors import LaunchInputError
from supervisor_reference.exit_codes import ExitCode
from supervisor_reference.launch import check_workspace, read_launch_inputs

if TYPE_CHECKING:
    from pathlib import Path

    from unit.supervisor.launch_material import LaunchMaterial

URL = "http://127.0.0.1:8080"


def test_reads_what_a_driver_stages(launch: LaunchMaterial, tmp_path: Path) -> None:
    flags = launch.stage(tmp_path)
    inputs = read_launch_inputs(flags, launch.environment(URL, OPENSHELL_SSH_SOCKET_PATH="/run/openshell/ssh.sock"))
    assert inputs.plan.descriptor == launch.descriptor
    assert inputs.plan.driver_descriptor == launch.descriptor.to_json()
    assert inputs.auth == launch.auth
    assert inputs.main_process.command == ("/bin/agent",)
    assert inputs.endpoint.target == "127.0.0.1:8080"
    assert inputs.workdir == "/sandbox"
    assert inputs.health_socket == tmp_path / "health.sock"
    assert inputs.without_effect == ("OPENSHELL_SSH_SOCKET_PATH",)


def test_a_health_socket_that_cannot_be_is_refused_by_name_and_limit(launch: LaunchMaterial, tmp_path: Path) -> None:
    flags = [*launch.stage(tmp_path), "--health-socket-path", "/" + "h" * 107]
    with pytest.raises(LaunchInputError, match=r"--health-socket-path: has 108 bytes; .* at most 107 bytes"):
        read_launch_inputs(flags, launch.environment(URL))


def test_a_host_key_that_nothing_uses_is_named_and_not_shown(launch: LaunchMaterial, tmp_path: Path) -> None:
    keyed = replace(launch, auth=replace(launch.auth, ssh_host_private_key="PRIVATE HOST KEY"))
    inputs = read_launch_inputs(keyed.stage(tmp_path), keyed.environment(URL))
    assert inputs.without_effect == ("ssh_host_private_key of the auth bundle",)
    assert "PRIVATE HOST KEY" not in repr(inputs)


def test_no_token_is_ever_shown(launch: LaunchMaterial, tmp_path: Path) -> None:
    inputs = read_launch_inputs(launch.stage(tmp_path), launch.environment(URL))
    assert launch.auth.gateway_token not in repr(inputs)
    assert launch.auth.sandbox_token not in repr(inputs)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"OPENSHELL_ADMITTED_ISOLATION_BACKEND": ""},
            "runtime descriptor supplied without an admitted isolation backend",
        ),
        (
            {"OPENSHELL_ADMITTED_ISOLATION_BACKEND": "other"},
            'descriptor backend "openshell-sandbox" does not match admitted backend "other"',
        ),
        ({"OPENSHELL_SANDBOX_ID": "another"}, "runtime descriptor does not match admitted sandbox"),
        ({"OPENSHELL_SANDBOX_ID": ""}, "runtime descriptor does not match admitted sandbox"),
        ({"OPENSHELL_ENDPOINT": ""}, "OPENSHELL_ENDPOINT is required"),
        ({"OPENSHELL_ENDPOINT": "ftp://h:1"}, "OPENSHELL_ENDPOINT must be http://host:port or https://host:port"),
        ({"OPENSHELL_ENDPOINT": "http://h:99999"}, "OPENSHELL_ENDPOINT is not a valid URL"),
        (
            {"OPENSHELL_ENDPOINT": "http://user:secret@h:1"},
            "OPENSHELL_ENDPOINT may hold a scheme, a host and a port, and nothing else",
        ),
        ({"OPENSHELL_TLS_CA": "/ca.pem"}, "TLS settings were given for a gateway endpoint without TLS"),
        (
            {"OPENSHELL_ENDPOINT": "https://h:1", "OPENSHELL_TLS_CERT": "/c.pem"},
            "OPENSHELL_TLS_CERT and OPENSHELL_TLS_KEY belong together; one of them is missing",
        ),
        (
            {"OPENSHELL_PROVIDER_SPIFFE_WORKLOAD_API_SOCKET": "/s"},
            "OPENSHELL_PROVIDER_SPIFFE_WORKLOAD_API_SOCKET is refused: SPIFFE provider identities are not built",
        ),
        (
            {"OPENSHELL_MAIN_PROCESS_SPEC": '{"version":2,"command":[],"tty":true}'},
            "OPENSHELL_MAIN_PROCESS_SPEC is not usable: main_process.version: must be 1",
        ),
        (
            {
                "OPENSHELL_MAIN_PROCESS_SPEC": (
                    '{"version":1,"command":["/a"],"tty":false,"await_main_process_attachment":true}'
                )
            },
            "OPENSHELL_MAIN_PROCESS_SPEC is refused: waiting for an attachment of the main process is not built",
        ),
    ],
)
def test_refuses_an_environment(launch: LaunchMaterial, tmp_path: Path, change: dict[str, str], text: str) -> None:
    with pytest.raises(LaunchInputError) as caught:
        read_launch_inputs(launch.stage(tmp_path), {**launch.environment(URL), **change})
    assert caught.value.public == text
    assert caught.value.exit_code is ExitCode.USAGE
    assert (caught.value.stage, caught.value.category) == (Stage.BUILD, Category.CONFIGURATION)


@pytest.mark.parametrize(
    ("member", "value", "text"),
    [
        (
            "session_id",
            "99999999-9999-4999-8999-999999999999",
            "supervisor authentication bundle does not match runtime session",
        ),
        ("runtime_generation", "other", "supervisor authentication bundle does not match runtime generation"),
        ("surprise", "x", "--auth-bundle-file is not usable: supervisor.surprise: is not a known field"),
    ],
)
def test_refuses_tokens_of_another_launch(
    launch: LaunchMaterial, tmp_path: Path, member: str, value: str, text: str
) -> None:
    flags = launch.stage(tmp_path)
    bundle = json.loads(launch.auth.to_json())
    bundle[member] = value
    (tmp_path / "auth.json").write_text(json.dumps(bundle))
    with pytest.raises(LaunchInputError) as caught:
        read_launch_inputs(flags, launch.environment(URL))
    assert caught.value.public == text


@pytest.mark.parametrize(
    "flag",
    [
        "--upstream-proxy=http://proxy:3128",
        "--upstream-no-proxy=localhost",
        "--upstream-proxy-auth-file=/auth",
        "--upstream-proxy-ca-bundle=/ca",
        "--upstream-proxy-auth-allow-insecure",
        "--upstream-proxy-connect-by-hostname",
        "--policy-rules=/rules",
        "--policy-data=/data",
        "--main-exit-marker=/marker",
        "--parent-liveness-fd=3",
    ],
)
def test_refuses_by_name_what_is_not_built(launch: LaunchMaterial, tmp_path: Path, flag: str) -> None:
    with pytest.raises(LaunchInputError) as caught:
        read_launch_inputs([*launch.stage(tmp_path), flag], launch.environment(URL))
    assert caught.value.public.startswith(f"{flag.partition('=')[0]} is refused: ")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], "--backend-descriptor-file is required"),
        (["--backend-descriptor-file", "/d"], "--auth-bundle-file is required"),
        (["--surprise"], "command line: unrecognized arguments: --surprise"),
        (["--workdi", "/x"], "command line: unrecognized arguments: --workdi /x"),
        (
            ["--backend-descriptor-file", "/nowhere/d", "--auth-bundle-file", "/a"],
            "--backend-descriptor-file /nowhere/d cannot be read: no such file or directory",
        ),
    ],
)
def test_refuses_a_command_line(launch: LaunchMaterial, flags: list[str], text: str) -> None:
    with pytest.raises(LaunchInputError) as caught:
        read_launch_inputs(flags, launch.environment(URL))
    assert caught.value.public == text


def test_refuses_a_file_without_end(launch: LaunchMaterial, tmp_path: Path) -> None:
    flags = launch.stage(tmp_path)
    (tmp_path / "auth.json").write_bytes(b" " * (1024 * 1024 + 1))
    with pytest.raises(LaunchInputError, match="is larger than 1048576 bytes"):
        read_launch_inputs(flags, launch.environment(URL))


@pytest.mark.parametrize("path", ["/sandbox", "/srv/app", "/home/agent", "/developer", "/system"])
def test_accepts_a_workspace(path: str) -> None:
    check_workspace(path)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "sandbox",
        "/",
        "//sandbox",
        "/a/../b",
        "/a/",
        "/a\0b",
        "/proc",
        "/sys/fs",
        "/dev/shm",
        "/run",
        "/run/openshell/x",
        "/etc/openshell",
        "/.openshell/channel",
    ],
)
def test_an_unusable_workspace_ends_with_its_own_code(path: str) -> None:
    with pytest.raises(LaunchInputError) as caught:
        check_workspace(path)
    assert int(caught.value.exit_code) == 78


def _delegated(launch: LaunchMaterial, folder: Path, *, registered: str, launched: str = "ext-1") -> list[str]:
    descriptor = launch.descriptor
    (folder / "launch.json").write_bytes(
        BoundaryLaunch(
            backend_name=launched,
            sandbox_id=descriptor.boundary_id,
            generation=descriptor.generation,
            session_id=descriptor.session_id,
            workload_identity=descriptor.workload_identity,
            tls=descriptor.tls,
            resource_claims=descriptor.resource_claims,
            outer_fence=descriptor.outer_fence,
        ).to_json()
    )
    registration = BackendRegistration(name=registered, endpoint=UnixTransport(socket_path="/run/ext.sock"))
    (folder / "backends.json").write_bytes(IsolationBackends(backends=(registration,)).to_json())
    flags = launch.stage(folder)
    (folder / "runtime-descriptor.json").write_bytes(b"\x00opaque")
    return [
        *flags,
        "--boundary-launch-file",
        str(folder / "launch.json"),
        "--isolation-backends-file",
        str(folder / "backends.json"),
    ]


def test_a_delegated_backend_is_reached_at_the_operators_endpoint(launch: LaunchMaterial, tmp_path: Path) -> None:
    flags = _delegated(launch, tmp_path, registered="ext-1")
    environment = launch.environment(URL, OPENSHELL_ADMITTED_ISOLATION_BACKEND="ext-1")
    plan = read_launch_inputs(flags, environment).plan
    assert plan.backend_name == "ext-1"
    assert plan.descriptor.transport == UnixTransport(socket_path="/run/ext.sock")
    assert plan.driver_descriptor == b"\x00opaque"


@pytest.mark.parametrize(
    ("registered", "launched", "admitted", "text"),
    [
        ("ext-2", "ext-1", "ext-1", "backend not registered: ext-1"),
        ("ext-1", "ext-1", "ext-2", 'descriptor backend "ext-1" does not match admitted backend "ext-2"'),
        ("ext-1", "openshell-sandbox", "openshell-sandbox", "backend not registered: openshell-sandbox"),
    ],
)
def test_a_delegated_backend_must_be_admitted_and_registered(
    launch: LaunchMaterial, tmp_path: Path, registered: str, launched: str, admitted: str, text: str
) -> None:
    flags = _delegated(launch, tmp_path, registered=registered, launched=launched)
    with pytest.raises(LaunchInputError) as caught:
        read_launch_inputs(flags, launch.environment(URL, OPENSHELL_ADMITTED_ISOLATION_BACKEND=admitted))
    assert caught.value.public == text
