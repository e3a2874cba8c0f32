"""Session tokens: EdDSA JWTs for the Sandbox Protocol and for the gateway (isolation contract 1).

The holder of a token needs no cryptography; its import is paid for by whoever makes a verifier or signs.
"""

from __future__ import annotations

import base64
import hmac
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from openshell.isolation.credentials import VerificationKey
from openshell.isolation.errors import DocumentError, TokenError
from openshell.isolation.json_fields import I64_MAX, U64_MAX, check_generation, check_text

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

MAX_LIFETIME_SECONDS = 3600
"""Longest lifetime of an expiring token."""
MAX_SKEW_SECONDS = 30
"""How far the two clocks may be apart."""
MAX_TOKEN_BYTES = 16 * 1024

_ALGORITHM = "EdDSA"
_ISSUER_PREFIX = "openshell-gateway:"
_SUBJECT_PREFIX = "spiffe://openshell/sandbox/"
_COMPONENT = "openshell-supervisor"
_HEADER = frozenset({"alg", "kid", "typ"})
_TEXT_CLAIMS = ("iss", "sub", "aud", "jti", "sandbox_id", "runtime_generation", "component")
_NUMBER_CLAIMS = ("iat", "exp", "auth_epoch")
_CLAIMS = frozenset((*_TEXT_CLAIMS, *_NUMBER_CLAIMS))


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

    def __post_init__(self) -> None:
        check_text(self.gateway_id, "claims.gateway_id", max_bytes=256)
        check_text(self.sandbox_id, "claims.sandbox_id", max_bytes=128)
        check_generation(self.runtime_generation, "claims.runtime_generation")
        if not 0 < self.auth_epoch <= U64_MAX:
            raise DocumentError("claims.auth_epoch", "must be at least 1 and fit in 64 bits")
        try:
            uuid.UUID(self.token_id)
        except ValueError:
            raise DocumentError("claims.jti", "must be a UUID") from None
        if not 0 <= self.issued_at <= I64_MAX or not 0 <= self.expires_at <= I64_MAX:
            raise DocumentError("claims.exp", "iat and exp must be Unix seconds")
        if self.expires_at:
            if self.issued_at >= self.expires_at:
                raise DocumentError("claims.exp", "must be later than iat")
            if self.expires_at - self.issued_at > MAX_LIFETIME_SECONDS:
                raise DocumentError("claims.exp", f"lifetime exceeds {MAX_LIFETIME_SECONDS} seconds")


def mint_sandbox_token(claims: TokenClaims, *, key_id: str, private_key_pem: str) -> str:
    """Sign a bearer token for the Sandbox Protocol.

    Raises:
        DocumentError: the key is no Ed25519 private key in PEM.
    """
    return _mint(TokenProfile.SANDBOX, claims, key_id, private_key_pem)


def mint_gateway_token(claims: TokenClaims, *, key_id: str, private_key_pem: str) -> str:
    """Sign a bearer token for the gateway.

    Raises:
        DocumentError: the key is no Ed25519 private key in PEM.
    """
    return _mint(TokenProfile.GATEWAY, claims, key_id, private_key_pem)


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

    Raises:
        DocumentError: a key is no Ed25519 public key in PEM.
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
        # Now, and not when the first peer waits for its answer.
        import jwt

        self._codec = jwt.PyJWT()
        self._profile = profile
        self._gateway_id = gateway_id
        self._keys = {key.key_id: _public_key(key) for key in keys}
        self._sandbox_id = sandbox_id
        self._generation = runtime_generation
        self._minimum_epoch = minimum_auth_epoch
        self._allow_nonexpiring = allow_nonexpiring
        self._clock = clock

    def verify(self, token: str) -> TokenClaims:
        """Check signature, header and every claim.

        Raises:
            TokenError: naming the rule that failed, never quoting the token.
        """
        payload = self._payload(token)
        texts = {name: _text_claim(payload, name) for name in _TEXT_CLAIMS}
        numbers = {name: _number_claim(payload, name) for name in _NUMBER_CLAIMS}
        _require_equal("iss", texts["iss"], _ISSUER_PREFIX + self._gateway_id)
        _require_equal("aud", texts["aud"], self._profile.audience)
        _require_equal("component", texts["component"], _COMPONENT)
        _require_equal("sub", texts["sub"], _SUBJECT_PREFIX + texts["sandbox_id"])
        if self._sandbox_id is not None:
            _require_equal("sandbox_id", texts["sandbox_id"], self._sandbox_id)
        if self._generation is not None:
            _require_equal("runtime_generation", texts["runtime_generation"], self._generation)
        try:
            claims = TokenClaims(
                gateway_id=self._gateway_id,
                sandbox_id=texts["sandbox_id"],
                runtime_generation=texts["runtime_generation"],
                auth_epoch=numbers["auth_epoch"],
                token_id=texts["jti"],
                issued_at=numbers["iat"],
                expires_at=numbers["exp"],
            )
        except DocumentError as error:
            raise TokenError(error.message) from None
        self._check_time(claims)
        if claims.auth_epoch < self._minimum_epoch:
            raise TokenError("auth_epoch is older than the one in force")
        return claims

    def verify_authorization(self, header: str | None) -> TokenClaims:
        """Check an ``authorization: Bearer`` value.

        Raises:
            TokenError: missing, not a bearer, or refused.
        """
        if not header:
            raise TokenError("no authorization was sent")
        scheme, _, token = header.partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise TokenError("authorization is not a bearer token")
        return self.verify(token.strip())

    def _payload(self, token: str) -> Mapping[str, object]:
        import jwt

        if len(token) > MAX_TOKEN_BYTES:
            raise TokenError("token is too long")
        try:
            header = jwt.get_unverified_header(token)
        except jwt.InvalidTokenError:
            raise TokenError("not a JWT") from None
        if set(header) != _HEADER:
            raise TokenError("header must hold alg, kid and typ, nothing else")
        if header["alg"] != _ALGORITHM:
            raise TokenError("alg must be EdDSA")
        if header["typ"] != self._profile.typ:
            raise TokenError(f"typ must be {self._profile.typ}")
        key = self._keys.get(header["kid"]) if isinstance(header["kid"], str) else None
        if key is None:
            raise TokenError("kid names no known key")
        try:
            # Only the signature is left to the library: the claims have rules of their own.
            payload: Mapping[str, object] = self._codec.decode(
                token,
                key=key,
                algorithms=[_ALGORITHM],
                options={
                    "verify_signature": True,
                    "verify_exp": False,
                    "verify_iat": False,
                    "verify_nbf": False,
                    "verify_aud": False,
                    "verify_iss": False,
                    "verify_sub": False,
                    "verify_jti": False,
                },
            )
        except jwt.InvalidSignatureError:
            raise TokenError("signature does not verify") from None
        except jwt.PyJWTError:
            raise TokenError("not a JWT") from None
        if unknown := sorted(set(payload) - _CLAIMS):
            raise TokenError(f"claim {unknown[0]} is not known")
        return payload

    def _check_time(self, claims: TokenClaims) -> None:
        now = self._clock()
        if claims.issued_at > now + MAX_SKEW_SECONDS:
            raise TokenError("iat lies in the future")
        if claims.expires_at == 0:
            if not self._allow_nonexpiring:
                raise TokenError("nonexpiring tokens are not enabled")
        elif claims.expires_at <= now - MAX_SKEW_SECONDS:
            raise TokenError("token has expired")


def read_auth_epoch(token: str) -> int:
    """The epoch that a token claims, unverified: for its holder, never for deciding whether to trust it.

    Raises:
        TokenError: the token is no JWT or claims no epoch.
    """
    _, _, rest = token.partition(".")
    encoded, _, signature = rest.partition(".")
    payload = _read_segment(encoded)
    if payload is None or not signature:
        raise TokenError("not a JWT")
    return _number_claim(payload, "auth_epoch")


def claims_to_be_session_token(token: str) -> bool:
    """Whether a token's header says that it is one of either profile, valid or not; unverified."""
    encoded, dot, _ = token.partition(".")
    header = _read_segment(encoded) if dot else None
    return header is not None and header.get("typ") in [profile.typ for profile in TokenProfile]


def _read_segment(encoded: str) -> Mapping[str, object] | None:
    """The JSON object in one part of a JWT; None for anything else."""
    if len(encoded) > MAX_TOKEN_BYTES:
        return None
    try:
        value = json.loads(base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True))
    except (ValueError, RecursionError):  # what is no base64, no UTF-8 and no JSON is among them
        return None
    return value if isinstance(value, dict) else None


def _mint(profile: TokenProfile, claims: TokenClaims, key_id: str, private_key_pem: str) -> str:
    import jwt
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(private_key_pem.encode("utf-8"), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise DocumentError("private_key_pem", "is not an unencrypted PEM private key") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise DocumentError("private_key_pem", "must be an Ed25519 key")
    return jwt.encode(
        {
            "iss": _ISSUER_PREFIX + claims.gateway_id,
            "sub": _SUBJECT_PREFIX + claims.sandbox_id,
            "aud": profile.audience,
            "iat": claims.issued_at,
            "exp": claims.expires_at,
            "jti": claims.token_id,
            "sandbox_id": claims.sandbox_id,
            "runtime_generation": claims.runtime_generation,
            "auth_epoch": claims.auth_epoch,
            "component": _COMPONENT,
        },
        key,
        algorithm=_ALGORITHM,
        headers={"kid": key_id, "typ": profile.typ},
    )


def _public_key(key: VerificationKey) -> Ed25519PublicKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        public = load_pem_public_key(key.public_key_pem.encode("utf-8"))
    except (ValueError, UnsupportedAlgorithm):
        raise DocumentError("verification_keys.public_key_pem", "is not a PEM public key") from None
    if not isinstance(public, Ed25519PublicKey):
        raise DocumentError("verification_keys.public_key_pem", "must be an Ed25519 key")
    return public


def _text_claim(payload: Mapping[str, object], name: str) -> str:
    value = payload.get(name)
    if not isinstance(value, str) or not value:
        raise TokenError(f"claim {name} is missing or not a string")
    return value


def _number_claim(payload: Mapping[str, object], name: str) -> int:
    value = payload.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TokenError(f"claim {name} is missing or not an integer")
    return value


def _require_equal(name: str, actual: str, expected: str) -> None:
    if not hmac.compare_digest(actual.encode("utf-8", "replace"), expected.encode("utf-8", "replace")):
        raise TokenError(f"claim {name} is not the expected one")
