"""The client of a gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from openshell._calls import Connection, TokenSource
from openshell._discovery import find_gateway
from openshell._endpoint import ChannelOptions, TlsConfig
from openshell._sandboxes import Sandboxes
from openshell.v1 import HealthRequest, HealthResponse

if TYPE_CHECKING:
    from types import TracebackType


class OpenShell:
    """A gateway, synchronously. Threads may share one client.

    Example:
        >>> with OpenShell("http://127.0.0.1:17670") as client:  # doctest: +SKIP
        ...     client.sandboxes.create("demo", image="example:1")
        ...     client.sandboxes.wait("demo")
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        gateway: str | None = None,
        workspace: str = "default",
        token: TokenSource | None = None,
        tls: TlsConfig | None = None,
        options: ChannelOptions | None = None,
        timeout_seconds: float = 30.0,
    ) -> None:
        """Choose a gateway; nothing is sent yet.

        Args:
            endpoint: Its address, for example ``http://127.0.0.1:17670``. None looks at ``OPENSHELL_GATEWAY_ENDPOINT``.
            gateway: Name of a configured gateway. None looks at ``OPENSHELL_GATEWAY``, then takes the active one.
            workspace: Where names are looked up unless a call says otherwise.
            token: Bearer token, or a function that returns one. Refused on a plaintext connection to another machine.
            tls: Files for TLS; None takes those of the configured gateway.
            options: Keepalive and sizes.
            timeout_seconds: Deadline of a call that names none.

        Raises:
            GatewayConfigurationError: No gateway is configured, or its files cannot be used.
            InvalidArgumentError: An argument cannot be used.
        """
        found = find_gateway(endpoint=endpoint, name=gateway)
        self._connection = Connection(
            found.endpoint,
            tls=tls or found.tls,
            token=token,
            options=options or ChannelOptions(),
            timeout_seconds=timeout_seconds,
        )
        self._sandboxes = Sandboxes(self._connection, workspace=workspace)

    @property
    def sandboxes(self) -> Sandboxes:
        """Sandboxes of this gateway."""
        return self._sandboxes

    @property
    def endpoint(self) -> str:
        """The gateway's address."""
        return str(self._connection.endpoint)

    def health(self, *, timeout_seconds: float | None = None) -> HealthResponse:
        """Whether the gateway serves, and the contract version it speaks.

        Raises:
            RpcError: It does not answer.
        """
        return self._connection.unary("Health", HealthRequest(), HealthResponse, timeout_seconds=timeout_seconds)

    def close(self) -> None:
        """End every call and the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        """The client itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        self.close()
