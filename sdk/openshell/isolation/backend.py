"""What an isolation backend has to be able to do: the class that a backend author fills in."""

from __future__ import annotations

from abc import ABC, abstractmethod

from openshell.isolation.errors import UnavailableError
from openshell.isolation.operations import (
    Attach,
    Confirmation,
    ExitStatus,
    ImagePolicy,
    ProviderEnvironmentUpdated,
    SessionSnapshot,
    Signal,
    StartAgent,
    Started,
    UpdateProviderEnvironment,
)


class Backend(ABC):
    """One boundary, as its backend enforces it.

    Every method may raise a ``BackendError``, which goes to the supervisor as it is; anything else is logged and
    reported as a process error without its text. The server calls a method only in a state where it is allowed.
    ``attach``, ``confirm``, ``start_agent``, ``freeze`` and ``resume`` never run at the same time, are never called
    twice for a replayed request, and run to their end even when the supervisor's connection is lost meanwhile.
    """

    @abstractmethod
    async def discover_policy(self) -> ImagePolicy:
        """The image's policy. Comes before Attach, possibly more than once."""

    @abstractmethod
    async def attach(self, request: Attach) -> SessionSnapshot:
        """Take the policy and establish every control that needs no running process. Succeeds at most once.

        Returns:
            What already runs, normally nothing.

        Raises:
            DeniedError: the policy asks for what this backend refuses.
            AttachError: the policy could not be established.
        """

    @abstractmethod
    async def snapshot(self) -> SessionSnapshot:
        """What runs now, for a supervisor that attaches again."""

    @abstractmethod
    async def confirm(self) -> Confirmation:
        """The evidence of enforcement; state only what is in force. Also asked when a supervisor comes back."""

    @abstractmethod
    async def start_agent(self, request: StartAgent) -> Started:
        """Start the main process; called at most once successfully."""

    @abstractmethod
    async def wait(self, process_id: str) -> ExitStatus:
        """Wait for a process to end; may be called several times, also after the end, and is cancelled with its caller.

        Raises:
            ProcessError: there is no such process.
        """

    @abstractmethod
    async def signal(self, process_id: str, signal: Signal) -> None:
        """Signal a process."""

    @abstractmethod
    async def terminate(self, process_id: str) -> None:
        """End a process and return once it is gone."""

    @abstractmethod
    async def terminate_boundary(self) -> None:
        """End every process. May come at any time, also during another call; nothing else is called afterwards."""

    @abstractmethod
    async def freeze(self) -> None:
        """Stop every workload process from running: the supervisor is lost. Called only while the agent runs."""

    @abstractmethod
    async def resume(self) -> None:
        """Let the workload run again: a supervisor confirmed. Idempotent."""

    async def update_provider_environment(self, request: UpdateProviderEnvironment) -> ProviderEnvironmentUpdated:
        """Replace the provider environment; not offered unless overridden."""
        raise UnavailableError(f"{request.TAG[1]} is not offered by this backend")

    async def supports_provider_files(self) -> bool:
        """Whether provider files can be delivered; false unless overridden."""
        return False
