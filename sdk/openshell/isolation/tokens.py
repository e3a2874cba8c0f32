"""Session tokens: EdDSA JWTs for the Sandbox Protocol and for the gateway (isolation contract 1)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from openshell.isolation.credentials import VerificationKey

MAX_LIFETIME_SECONDS = 3600
MAX_SKEW_SECONDS = 30


class TokenProfile(Enum):
    """Whom a token is for: its ``typ`` and its ``aud``."""

    SANDBOX = ("openshell-sandbox-session+jwt", "openshell-sandbox")
    GATEWAY = ("openshell-gateway-session+jwt", "openshell-gateway")

    @property
    def typ(self) -> str:
        """The header's ``typ``."""
        return self.value[0]

    @property
    def audience(self) -> str:
        """The ``aud`` claim."""
        return self.value[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenClaims:
    """The claims of a session token.

    Attributes:
        gateway_id: the issuing gateway; ``iss`` is ``openshell-gateway:<id>``.
        sandbox_id: the sandbox; ``sub`` is ``spiffe://openshell/sandbox/<id>``.
        runtime_generation: the generation.
        auth_epoch: credential epoch, at least 1.
        token_id: ``jti``, a UUID.
        issued_at: Unix seconds.
        expires_at: Unix seconds, 0 for the nonexpiring profile.
    """

    gateway_id: str
    sandbox_id: str
    runtime_generation: str
    auth_epoch: int
    token_id: str
    issued_at: int
    expires_at: int


def mint_sandbox_token(claims: TokenClaims, *, key_id: str, private_key_pem: str) -> str:
    """Sign a bearer token for the Sandbox Protocol."""
    raise NotImplementedError


def mint_gateway_token(claims: TokenClaims, *, key_id: str, private_key_pem: str) -> str:
    """Sign a bearer token for the gateway."""
    raise NotImplementedError


class TokenVerifier:
    """Verifies tokens of one profile.

    Args:
        profile: sandbox or gateway.
        gateway_id: the only accepted issuer.
        keys: public keys by ``kid``.
        sandbox_id: the only accepted sandbox, or any when none.
        runtime_generation: the only accepted generation, or any when none.
        minimum_auth_epoch: oldest accepted credential epoch.
        allow_nonexpiring: accept ``exp`` 0; off unless the operator turned it on.
        clock: current Unix time in seconds.
    """

    def __init__(
        self,
        *,
        profile: TokenProfile,
        gateway_id: str,
        keys: Sequence[VerificationKey],
        sandbox_id: str | None = None,
        runtime_generation: str | None = None,
        minimum_auth_epoch: int = 1,
        allow_nonexpiring: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        raise NotImplementedError

    def verify(self, token: str) -> TokenClaims:
        """Check signature, header and every claim.

        Raises:
            TokenError: naming the rule that failed, never quoting the token.
        """
        raise NotImplementedError

    def verify_authorization(self, header: str | None) -> TokenClaims:
        """Check an ``authorization: Bearer`` value.

        Raises:
            TokenError: missing, not a bearer, or refused.
        """
        raise NotImplementedError
