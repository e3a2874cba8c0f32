"""What a supervisor is launched with: flags, environment and files, read once and checked before anything is opened.

Sources: isolation contract 1 ("Supervisor launch inputs", "Selection checks") and compute-driver contract 5.7. Nothing
is ignored in silence: an input that asks for something that is not built is refused by name (`_NOT_BUILT_FLAGS`,
`_NOT_BUILT_VARIABLES`), and one that merely tunes what is not built is listed in `LaunchInputs.without_effect`, which
the supervisor logs.
"""

from __future__ import annotations

import argparse
import posixpath
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

from openshell.isolation.documents import (
    AuthBundle,
    BoundaryLaunch,
    DocumentError,
    IsolationBackends,
    MainProcessSpec,
    RuntimeDescriptor,
)
from openshell.isolation.endpoints import check_socket_path
from openshell.isolation.errors import cause_of
from supervisor_reference.endpoint import GatewayEndpoint, parse_endpoint
from supervisor_reference.errors import LaunchInputError
from supervisor_reference.exit_codes import ExitCode
from supervisor_reference.selection import BoundaryPlan, check_authentication, select_boundary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_Raw = TypeVar("_Raw")
_Document = TypeVar("_Document")

_MAX_FILE_BYTES: Final = 1024 * 1024

_NOT_BUILT_FLAGS: Final[dict[str, str]] = {
    "--upstream-proxy": "mediated egress is not built, so there is nothing that could use an upstream proxy",
    "--upstream-no-proxy": "mediated egress is not built, so there is nothing that could use an upstream proxy",
    "--upstream-proxy-auth-file": "mediated egress is not built, so there is nothing that could use an upstream proxy",
    "--upstream-proxy-ca-bundle": "mediated egress is not built, so there is nothing that could use an upstream proxy",
    "--policy-rules": "the sandbox is managed by a gateway; a local policy cannot be combined with that",
    "--policy-data": "the sandbox is managed by a gateway; a local policy cannot be combined with that",
    "--main-exit-marker": "exit markers are not built; the gateway is told of the main process's exit",
    "--parent-liveness-fd": "parent liveness is not built; end the supervisor with SIGTERM",
}
_NOT_BUILT_SWITCHES: Final[dict[str, str]] = {
    "--upstream-proxy-auth-allow-insecure": _NOT_BUILT_FLAGS["--upstream-proxy"],
    "--upstream-proxy-connect-by-hostname": _NOT_BUILT_FLAGS["--upstream-proxy"],
}
_NOT_BUILT_VARIABLES: Final[dict[str, str]] = {
    "OPENSHELL_PROVIDER_SPIFFE_WORKLOAD_API_SOCKET": "SPIFFE provider identities are not built",
}
_VARIABLES_WITHOUT_EFFECT: Final = (
    "OPENSHELL_NETWORK_RUNTIME_CAPABILITIES",
    "OPENSHELL_POLICY_POLL_INTERVAL_SECS",
    "OPENSHELL_PROXY_TLS_DIR",
    "OPENSHELL_SANDBOX_TOKEN_FILE",
    "OPENSHELL_SSH_SOCKET_PATH",
    "OPENSHELL_TELEMETRY_ENABLED",
)
_TLS_FILES: Final[dict[str, str]] = {
    "OPENSHELL_TLS_CA": "ca",
    "OPENSHELL_TLS_CERT": "certificate",
    "OPENSHELL_TLS_KEY": "key",
}

# Control roots and kernel file systems that no workspace may lie in or over (compute-driver contract 5.6).
_FORBIDDEN_WORKSPACE_ROOTS: Final = (
    "/proc",
    "/sys",
    "/dev",
    "/opt/openshell",
    "/etc/openshell",
    "/etc/openshell-tls",
    "/run/openshell",
    "/run/openshell-sidecar",
    "/run/netns",
    "/var/run/netns",
    "/.openshell",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchInputs:
    """Everything a supervisor knows when it starts, validated."""

    endpoint: GatewayEndpoint
    sandbox_id: str
    sandbox_name: str
    plan: BoundaryPlan
    """The boundary to drive and how to reach it."""
    auth: AuthBundle = field(repr=False)
    main_process: MainProcessSpec
    workdir: str
    """The workspace root, inside the workload."""
    health_socket: Path | None
    log_level: str
    without_effect: tuple[str, ...] = ()
    """Inputs by name that are set but tune something that is not built."""


class _Arguments(argparse.Namespace):
    """The command line, typed."""

    backend_descriptor_file: Path | None
    boundary_launch_file: Path | None
    isolation_backends_file: Path | None
    auth_bundle_file: Path | None
    workdir: str
    health_socket_path: Path | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchInputError(f"command line: {message}")


class _Refuse(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        reason = {**_NOT_BUILT_FLAGS, **_NOT_BUILT_SWITCHES}[option_string or ""]
        raise LaunchInputError(f"{option_string} is refused: {reason}")


def read_launch_inputs(arguments: Sequence[str], environment: Mapping[str, str]) -> LaunchInputs:
    """Read and check flags, environment and files.

    Args:
        arguments: The command line without the program's name.
        environment: The process environment.

    Raises:
        LaunchInputError: An input is missing, malformed, contradictory or not built. The text names the input and
            never quotes a secret.
    """
    flags = _parser().parse_args(arguments, namespace=_Arguments())
    for name, reason in _NOT_BUILT_VARIABLES.items():
        if environment.get(name):
            raise LaunchInputError(f"{name} is refused: {reason}")
    if flags.backend_descriptor_file is None:
        raise LaunchInputError("--backend-descriptor-file is required")
    if flags.auth_bundle_file is None:
        raise LaunchInputError("--auth-bundle-file is required")
    check_workspace(flags.workdir)
    _check_health_socket(flags.health_socket_path)
    sandbox_id = environment.get("OPENSHELL_SANDBOX_ID", "")
    plan = _plan(flags, flags.backend_descriptor_file, environment, sandbox_id)
    auth = _document("--auth-bundle-file", AuthBundle.from_json, flags.auth_bundle_file)
    check_authentication(plan, auth)
    return LaunchInputs(
        endpoint=_endpoint(environment),
        sandbox_id=sandbox_id,
        sandbox_name=environment.get("OPENSHELL_SANDBOX", ""),
        plan=plan,
        auth=auth,
        main_process=_main_process(environment.get("OPENSHELL_MAIN_PROCESS_SPEC", "")),
        workdir=flags.workdir,
        health_socket=flags.health_socket_path,
        log_level=environment.get("OPENSHELL_LOG_LEVEL", "info"),
        without_effect=_without_effect(environment, auth),
    )


def _check_health_socket(path: Path | None) -> None:
    try:
        check_socket_path(str(path or ""), "--health-socket-path")
    except DocumentError as error:
        raise LaunchInputError(error.message) from error


def _without_effect(environment: Mapping[str, str], auth: AuthBundle) -> tuple[str, ...]:
    names = [name for name in _VARIABLES_WITHOUT_EFFECT if environment.get(name)]
    if auth.ssh_host_private_key is not None:
        names.append("ssh_host_private_key of the auth bundle")
    return tuple(names)


def check_workspace(workdir: str) -> None:
    """Check that a workspace root may be used (compute-driver contract 5.6).

    Raises:
        LaunchInputError: It may not; its exit code is 78.
    """
    problem = None
    if not workdir.startswith("/") or "\0" in workdir:
        problem = "must be an absolute path"
    elif posixpath.normpath(workdir) != workdir or workdir.startswith("//"):
        problem = "must be normalised"
    elif workdir == "/":
        problem = "must not be the root of the file system"
    else:
        problem = next((f"overlaps {root}" for root in _FORBIDDEN_WORKSPACE_ROOTS if _overlap(workdir, root)), None)
    if problem is not None:
        raise LaunchInputError(f"workspace root {workdir!r} cannot be used: it {problem}", exit_code=ExitCode.WORKSPACE)


def _overlap(path: str, root: str) -> bool:
    return path == root or path.startswith(root + "/") or root.startswith(path + "/")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="openshell-supervisor",
        allow_abbrev=False,
        description="Control supervisor of one sandbox.",
        epilog="openshell-supervisor health --socket PATH asks a running supervisor whether it is ready.",
    )
    parser.add_argument("--backend-descriptor-file", type=Path, metavar="FILE", help="the driver's descriptor")
    parser.add_argument("--boundary-launch-file", type=Path, metavar="FILE", help="launch of a delegated backend")
    parser.add_argument("--isolation-backends-file", type=Path, metavar="FILE", help="registered backends")
    parser.add_argument("--auth-bundle-file", type=Path, metavar="FILE", help="tokens of this launch")
    parser.add_argument("--workdir", default="/sandbox", metavar="PATH", help="workspace root in the workload")
    parser.add_argument("--health-socket-path", type=Path, metavar="PATH", help="where readiness is served")
    for name in _NOT_BUILT_FLAGS:
        parser.add_argument(name, action=_Refuse, help=argparse.SUPPRESS)
    for name in _NOT_BUILT_SWITCHES:
        parser.add_argument(name, action=_Refuse, nargs="?", help=argparse.SUPPRESS)
    return parser


def _plan(flags: _Arguments, descriptor_file: Path, environment: Mapping[str, str], sandbox_id: str) -> BoundaryPlan:
    descriptor = _read("--backend-descriptor-file", descriptor_file)
    launch: BoundaryLaunch | RuntimeDescriptor
    if flags.boundary_launch_file is None:
        launch = _parsed("--backend-descriptor-file", RuntimeDescriptor.from_json, descriptor)
    else:
        launch = _document("--boundary-launch-file", BoundaryLaunch.from_json, flags.boundary_launch_file)
    backends = IsolationBackends()
    if flags.isolation_backends_file is not None:
        backends = _document("--isolation-backends-file", IsolationBackends.from_json, flags.isolation_backends_file)
    return select_boundary(
        admitted=environment.get("OPENSHELL_ADMITTED_ISOLATION_BACKEND", ""),
        sandbox_id=sandbox_id,
        launch=launch,
        backends=backends,
        driver_descriptor=descriptor,
    )


def _endpoint(environment: Mapping[str, str]) -> GatewayEndpoint:
    url = environment.get("OPENSHELL_ENDPOINT", "")
    if not url:
        raise LaunchInputError("OPENSHELL_ENDPOINT is required")
    files = {role: Path(environment[name]) for name, role in _TLS_FILES.items() if environment.get(name)}
    return parse_endpoint(url, files, server_name=environment.get("OPENSHELL_GATEWAY_TLS_SERVER_NAME") or None)


def _main_process(text: str) -> MainProcessSpec:
    if not text:
        # A launch without a specification is a scratch sandbox: the default shell on a terminal.
        return MainProcessSpec(tty=True)
    spec = _parsed("OPENSHELL_MAIN_PROCESS_SPEC", MainProcessSpec.from_json, text)
    if spec.await_main_process_attachment:
        raise LaunchInputError(
            "OPENSHELL_MAIN_PROCESS_SPEC is refused: waiting for an attachment of the main process is not built"
        )
    return spec


def _read(name: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise LaunchInputError(f"{name} {path} cannot be read: {cause_of(error).lower()}") from error
    if len(data) > _MAX_FILE_BYTES:
        raise LaunchInputError(f"{name} {path} is larger than {_MAX_FILE_BYTES} bytes")
    return data


def _parsed(name: str, parse: Callable[[_Raw], _Document], data: _Raw) -> _Document:
    try:
        return parse(data)
    except DocumentError as error:
        raise LaunchInputError(f"{name} is not usable: {error.message}") from error


def _document(name: str, parse: Callable[[bytes], _Document], path: Path) -> _Document:
    return _parsed(name, parse, _read(name, path))
