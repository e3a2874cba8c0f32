"""What can go wrong in the sandbox runtime, and the exit codes by which PID 1 says it."""

from __future__ import annotations

from enum import IntEnum

from openshell.status import StatusCode


class RuntimeExit(IntEnum):
    """Exit codes of PID 1 that are not the agent's own.

    When the agent ran, PID 1 ends with the agent's code, or 128 + the number of the signal that ended it. The codes
    below are for the ends in which there is no such code. They follow sysexits(3).
    """

    NEVER_STARTED = 0
    """The boundary was terminated by request before an agent was started."""
    USAGE = 64
    """The command line could not be understood."""
    BOOTSTRAP_INVALID = 65
    """The bootstrap document or its TLS material is missing, malformed or not what it should be."""
    FAULT = 70
    """A defect of the runtime itself."""
    PLATFORM = 71
    """The kernel or the container lacks something that the runtime needs (Landlock, a writable channel)."""
    SUPERVISOR_LOST = 75
    """The supervisor did not come back within the recovery deadline; the agent was ended, or never started."""
    PRIVILEGE = 77
    """The container's privileges are not the floor that the runtime insists on."""
    STOPPED = 143
    """SIGTERM or SIGINT from outside the container: an orderly stop."""


class SandboxRuntimeError(Exception):
    """Root of the runtime's errors.

    Attributes:
        reason: A stable CamelCase word for programs.
        retryable: Whether the same call can succeed later without a change by the caller.
        status: The gRPC status that fits.
        exit_code: The code with which PID 1 ends when this error ends it.
    """

    reason: str = "SandboxRuntimeFault"
    retryable: bool = False
    status: StatusCode = StatusCode.INTERNAL
    exit_code: RuntimeExit = RuntimeExit.FAULT


class UsageError(SandboxRuntimeError):
    """The command line is wrong."""

    reason = "UsageInvalid"
    status = StatusCode.INVALID_ARGUMENT
    exit_code = RuntimeExit.USAGE


class BootstrapError(SandboxRuntimeError):
    """The bootstrap document, or a file that it names, cannot be used."""

    reason = "BootstrapInvalid"
    status = StatusCode.INVALID_ARGUMENT
    exit_code = RuntimeExit.BOOTSTRAP_INVALID


class PlatformError(SandboxRuntimeError):
    """The kernel or the container lacks something that the runtime cannot do without."""

    reason = "PlatformUnsupported"
    status = StatusCode.FAILED_PRECONDITION
    exit_code = RuntimeExit.PLATFORM


class PrivilegeError(SandboxRuntimeError):
    """PID 1 holds more privilege, or another identity, than a workload may have."""

    reason = "PrivilegeFloorViolated"
    status = StatusCode.PERMISSION_DENIED
    exit_code = RuntimeExit.PRIVILEGE


class PolicyRefusedError(SandboxRuntimeError):
    """The policy asks for something that this container cannot enforce as written."""

    reason = "PolicyRefused"
    status = StatusCode.PERMISSION_DENIED


class LaunchError(SandboxRuntimeError):
    """A program could not be started; the text names the program and the cause."""

    reason = "LaunchFailed"
    status = StatusCode.FAILED_PRECONDITION


class TreeError(SandboxRuntimeError):
    """The process tree could not be brought into the state that was asked for within its bound."""

    reason = "ProcessTreeUnsettled"
    status = StatusCode.DEADLINE_EXCEEDED
