"""Which gateway this driver faces: kept from its last handshake.

Two generations of the contract exist (compute-driver contract 1.3). A gateway of the current one introduces itself in
`GetCapabilitiesRequest.gateway`; one of the older generation does not know that field. The fields of both never
collide, so an older gateway can be served by the union of them, where the operator admits it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from driver_docker.capabilities import SUPPORTED_CAPABILITIES, check_peer

if TYPE_CHECKING:
    from collections.abc import Collection

    from driver_docker.capabilities import Peer


class OlderGateways(StrEnum):
    """What becomes of a gateway that does not introduce itself."""

    REFUSE = "refuse"
    """It is refused, as drivers of the current generation must (compute-driver contract 3.2)."""
    SERVE = "serve"
    """It is served: times are sent in the fields of both generations (compute-driver contract 1.3)."""


class Handshake:
    """The gateway that shook hands last. There is one gateway to a driver; a refused one changes nothing.

    Args:
        older_gateways: What becomes of a gateway that does not introduce itself.
        offered: The capabilities that a gateway may require.
    """

    def __init__(self, older_gateways: OlderGateways, *, offered: Collection[str] = SUPPORTED_CAPABILITIES) -> None:
        self._older_gateways = older_gateways
        self._offered = offered
        self._peer: Peer | None = None
        self._older = False

    @property
    def peer(self) -> Peer | None:
        """The gateway's metadata; `None` before the first handshake and for a gateway of the older generation."""
        return self._peer

    @property
    def older(self) -> bool:
        """Whether the gateway is of the older generation."""
        return self._older

    def shake(self, peer: Peer | None) -> None:
        """Accept a gateway and remember it.

        Args:
            peer: Its metadata, `None` when the request had none.

        Raises:
            PreconditionError: It does not fit (compute-driver contract 2.3 and 3.2).
        """
        if peer is None and self._older_gateways is OlderGateways.SERVE:
            self._peer, self._older = None, True
            return
        self._peer, self._older = check_peer(peer, offered=self._offered), False
