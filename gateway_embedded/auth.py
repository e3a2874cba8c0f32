"""Who is calling: a user on loopback, who needs no token, or a sandbox, known by its gateway token alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gateway_embedded.errors import PermissionDeniedError, UnauthenticatedError
from gateway_embedded.rpc_table import AuthMode
from gateway_embedded.sandboxes import SandboxRecord
from gateway_embedded.tokens import TokenAuthority
from openshell.isolation.tokens import claims_to_be_session_token


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """Whoever can reach the loopback listener."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxPrincipal:
    """The supervisor of one launch of one sandbox."""

    sandbox_id: str
    generation: str
    auth_epoch: int

    def require(self, sandbox_id: str) -> None:
        """Row 1 of isolation contract 4.3: a supervisor speaks for its own sandbox only.

        Raises:
            PermissionDeniedError: The request names another sandbox.
        """
        if sandbox_id != self.sandbox_id:
            raise PermissionDeniedError("the gateway token belongs to another sandbox than the request names")

    def require_launch(self, record: SandboxRecord) -> None:
        """Refuse credentials of an earlier launch of the same sandbox.

        Raises:
            UnauthenticatedError: The token is not of the launch that is stored.
        """
        if self.generation != record.launch.generation or self.auth_epoch != record.launch.auth_epoch:
            raise UnauthenticatedError(f"the gateway token belongs to an earlier launch of sandbox {record.name!r}")


Principal = User | SandboxPrincipal


def authenticate(mode: AuthMode, metadata: Iterable[tuple[str, str | bytes]], authority: TokenAuthority) -> Principal:
    """The caller of an RPC.

    Raises:
        UnauthenticatedError: The RPC is a supervisor's and carries no valid gateway token, or it carries a supervisor's
            token that is not valid.
        PermissionDeniedError: A supervisor calls what is for users only.
    """
    header = _authorization(metadata)
    if mode is AuthMode.SANDBOX:
        return _sandbox(header, authority)
    if header is None or mode is AuthMode.UNAUTHENTICATED:
        return User()
    try:
        principal = _sandbox(header, authority)
    except UnauthenticatedError:
        if claims_to_be_session_token(header.partition(" ")[2].strip()):
            # A supervisor whose token expired or is another gateway's: as a user it would be told nonsense.
            raise
        # Users need no token here, so one that means nothing to this gateway does no harm.
        return User()
    if mode is AuthMode.DUAL:
        return principal
    raise PermissionDeniedError("a sandbox's gateway token may not be used for calls of users")


def _sandbox(header: str | None, authority: TokenAuthority) -> SandboxPrincipal:
    claims = authority.verify(header)
    return SandboxPrincipal(
        sandbox_id=claims.sandbox_id, generation=claims.runtime_generation, auth_epoch=claims.auth_epoch
    )


def _authorization(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    values = [value for key, value in metadata if key.lower() == "authorization"]
    if not values:
        return None
    value = values[0]
    return value if isinstance(value, str) else value.decode("utf-8", "replace")
