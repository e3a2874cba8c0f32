"""What every command gets: the chosen gateway, and consoles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openshell import OpenShell


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Options given before the command."""

    gateway: str | None
    endpoint: str | None
    workspace: str

    def client(self) -> OpenShell:
        """Open a client of the chosen gateway.

        Raises:
            OpenShellError: No usable gateway is chosen or configured.
        """
        from openshell import OpenShell

        return OpenShell(self.endpoint, gateway=self.gateway, workspace=self.workspace)
