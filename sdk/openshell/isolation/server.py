"""A backend as a handful of methods, and the server that speaks both gRPC services for it.

A backend author subclasses :class:`Backend`; :class:`BoundaryServer` does the rest: TLS, negotiation, OpenBoundary,
tokens, framing, digests, replay, connection states, freeze and recovery (isolation contract 2.3, 2.4, 3).
"""

from __future__ import annotations

import ssl
from abc import ABC, abstractmethod
from pathlib import Path

from openshell.isolation.documents import BoundaryBootstrap
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
from openshell.isolation.tokens import TokenVerifier


class Backend(ABC):
    """What a backend has to be able to do. Every method may raise a ``BackendError``; it goes to the supervisor as is.

    The server calls a method only in a state where it is allowed, never two state-changing ones at once, and never
    twice for a replayed request.
    """

    @abstractmethod
    async def discover_policy(self) -> ImagePolicy:
        """The image's policy."""

    @abstractmethod
    async def attach(self, request: Attach) -> SessionSnapshot:
        """Take the policy and establish every control that needs no running process."""

    @abstractmethod
    async def snapshot(self) -> SessionSnapshot:
        """What runs now, for a supervisor that attaches again."""

    @abstractmethod
    async def confirm(self) -> Confirmation:
        """The evidence of enforcement; state only what is in force."""

    @abstractmethod
    async def start_agent(self, request: StartAgent) -> Started:
        """Start the main process."""

    @abstractmethod
    async def wait(self, process_id: str) -> ExitStatus:
        """Wait for a process to end; may be called several times, also after the end."""

    @abstractmethod
    async def signal(self, process_id: str, signal: Signal) -> None:
        """Signal a process."""

    @abstractmethod
    async def terminate(self, process_id: str) -> None:
        """End a process."""

    @abstractmethod
    async def terminate_boundary(self) -> None:
        """End every process; idempotent. The boundary serves nothing afterwards."""

    @abstractmethod
    async def freeze(self) -> None:
        """Stop every workload process from running: the supervisor is lost."""

    @abstractmethod
    async def resume(self) -> None:
        """Let the workload run again: a supervisor confirmed."""

    async def update_provider_environment(self, request: UpdateProviderEnvironment) -> ProviderEnvironmentUpdated:
        """Replace the provider environment; unavailable unless overridden."""
        raise NotImplementedError


class BoundaryServer:
    """Serves one boundary.

    Args:
        backend: the backend.
        bootstrap: what the boundary was provisioned as; OpenBoundary is checked against it.
        backend_name: the admitted name.
        tls: server context (``tls.server_context``).
        verifier: verifier of sandbox tokens (``tokens.TokenVerifier``).
        implementation_version: diagnostic version in the negotiation.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bootstrap: BoundaryBootstrap,
        tls: ssl.SSLContext,
        verifier: TokenVerifier,
        backend_name: str = "openshell-sandbox",
        implementation_version: str = "0",
    ) -> None:
        raise NotImplementedError

    async def start_unix(self, socket_path: Path) -> None:
        """Listen on a Unix socket (mode 0666; its folder decides who reaches it, TLS and token who may speak)."""
        raise NotImplementedError

    async def wait_terminal(self) -> None:
        """Return once the boundary is Terminal: terminated on request, or because no supervisor came back in 30 s."""
        raise NotImplementedError

    async def close(self) -> None:
        """Stop listening, cut every connection, release everything; idempotent. Does not touch the workload."""
        raise NotImplementedError
