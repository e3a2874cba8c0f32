"""The gateway's signing key and the tokens of a launch (isolation contract 1, compute-driver contract 5.3)."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gateway_embedded.errors import ConfigurationError, UnauthenticatedError
from gateway_embedded.sandboxes import Launch
from openshell.isolation.credentials import AuthBundle, LaunchAuthentication, VerificationKey
from openshell.isolation.errors import IsolationError
from openshell.isolation.tokens import (
    TokenClaims,
    TokenProfile,
    TokenVerifier,
    mint_gateway_token,
    mint_sandbox_token,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SigningKey:
    """The Ed25519 key that signs every token of this gateway."""

    key_id: str
    private_key_pem: str = field(repr=False)
    public_key_pem: str = field(repr=False)

    @classmethod
    def open(cls, path: Path) -> SigningKey:
        """Read the key, or make one that only its owner can read.

        Raises:
            ConfigurationError: The file exists and is not such a key, or others may read it.
        """
        if not path.exists():
            _write_owner_only(path, _pem_of(Ed25519PrivateKey.generate()))
        if path.stat().st_mode & 0o077:
            raise ConfigurationError(f"the signing key {path} is readable by others; set its mode to 0600")
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigurationError(
                f"{path} holds no readable private key; remove it to have a new one made"
            ) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigurationError(f"{path} is not an Ed25519 key; remove it to have a new one made")
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        return cls(
            key_id=hashlib.sha256(public).hexdigest()[:16],
            private_key_pem=_pem_of(key).decode(),
            public_key_pem=public.decode(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MintedTokens:
    """The two tokens of one launch and the times at which they expire."""

    gateway_token: str = field(repr=False)
    gateway_expires_at: datetime | None
    """Nothing when it never does."""
    sandbox_token: str = field(repr=False)
    sandbox_expires_at: datetime


class TokenAuthority:
    """Mints and checks the tokens of this gateway's sandboxes.

    Args:
        gateway_id: Names the issuer.
        key: Signs.
        lifetime: How long a token is valid.
        nonexpiring_gateway_tokens: Mint gateway tokens that never expire, and accept them (isolation contract 1).
        clock: Unix time in seconds, by which tokens expire.
    """

    def __init__(
        self,
        *,
        gateway_id: str,
        key: SigningKey,
        lifetime: timedelta,
        nonexpiring_gateway_tokens: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._gateway_id = gateway_id
        self._key = key
        self._lifetime = lifetime
        self._public = VerificationKey(key_id=key.key_id, public_key_pem=key.public_key_pem)
        self._nonexpiring = nonexpiring_gateway_tokens
        self._verifier = TokenVerifier(
            profile=TokenProfile.GATEWAY,
            gateway_id=gateway_id,
            keys=(self._public,),
            allow_nonexpiring=nonexpiring_gateway_tokens,
            clock=clock,
        )

    def mint(self, sandbox_id: str, launch: Launch, *, now: datetime) -> MintedTokens:
        """Fresh tokens for a launch."""
        issued_at = int(now.timestamp())
        expires_at = (now + self._lifetime).replace(microsecond=0)

        def claims(expires_at: datetime | None) -> TokenClaims:
            return TokenClaims(
                gateway_id=self._gateway_id,
                sandbox_id=sandbox_id,
                runtime_generation=launch.generation,
                auth_epoch=launch.auth_epoch,
                token_id=str(uuid.uuid4()),
                issued_at=issued_at,
                expires_at=_seconds(expires_at),
            )

        gateway_expires_at = None if self._nonexpiring else expires_at
        key_id, private = self._key.key_id, self._key.private_key_pem
        return MintedTokens(
            gateway_token=mint_gateway_token(claims(gateway_expires_at), key_id=key_id, private_key_pem=private),
            gateway_expires_at=gateway_expires_at,
            sandbox_token=mint_sandbox_token(claims(expires_at), key_id=key_id, private_key_pem=private),
            sandbox_expires_at=expires_at,
        )

    def launch_authentication(self, launch: Launch, tokens: MintedTokens) -> bytes:
        """The JSON document that a driver splits between supervisor and workload. Secret."""
        bundle = AuthBundle(
            session_id=launch.session_id,
            runtime_generation=launch.generation,
            session_rotation=launch.session_rotation,
            auth_epoch=launch.auth_epoch,
            gateway_token=tokens.gateway_token,
            gateway_expires_at=_seconds(tokens.gateway_expires_at),
            sandbox_token=tokens.sandbox_token,
            sandbox_expires_at=_seconds(tokens.sandbox_expires_at),
        )
        document = LaunchAuthentication(
            supervisor=bundle, gateway_id=self._gateway_id, verification_keys=(self._public,)
        )
        return document.to_json()

    def verify(self, authorization: str | None) -> TokenClaims:
        """The claims of an ``authorization`` value.

        Raises:
            UnauthenticatedError: It is missing or not a valid gateway token of this gateway.
        """
        try:
            return self._verifier.verify_authorization(authorization)
        except IsolationError as error:
            raise UnauthenticatedError(f"a valid gateway token is required: {error}") from error


def new_launch(*, rotation: int = 1, auth_epoch: int = 1) -> Launch:
    """The identity of a new launch."""
    return Launch(
        generation=str(uuid.uuid4()), session_id=str(uuid.uuid4()), session_rotation=rotation, auth_epoch=auth_epoch
    )


def _seconds(moment: datetime | None) -> int:
    """Unix seconds; 0 stands for never."""
    return 0 if moment is None else int(moment.timestamp())


def _pem_of(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_owner_only(path: Path, content: bytes) -> None:
    """Write a file that is complete or absent, readable by its owner alone."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
