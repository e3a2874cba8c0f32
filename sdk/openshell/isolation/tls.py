"""TLS of one launch session: its material, and the contexts of both peers (compute-driver contract 5.6)."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTls:
    """The TLS material of one session; the CA's key no longer exists.

    Attributes:
        server_name: ``sandbox.<session_id>.openshell.internal``.
        trust_anchor_pem: the session CA.
        certificate_chain_pem: the server leaf.
        private_key_pem: the leaf's PKCS#8 key (secret).
    """

    server_name: str
    trust_anchor_pem: str = field(repr=False)
    certificate_chain_pem: str = field(repr=False)
    private_key_pem: str = field(repr=False)


def issue_session_tls(session_id: str) -> SessionTls:
    """Make an Ed25519 CA, sign one server leaf with it and forget the CA's key.

    Raises:
        DocumentError: the session id is no canonical, non-nil UUID.
    """
    raise NotImplementedError


def server_context(*, certificate_chain_pem: str, private_key_pem: str) -> ssl.SSLContext:
    """A server context: TLS 1.3 only, ALPN ``h2``.

    Raises:
        DocumentError: the chain or the key cannot be used.
    """
    raise NotImplementedError


def client_context(*, trust_anchor_pem: str) -> ssl.SSLContext:
    """A client context: TLS 1.3 only, ALPN ``h2``, trusting only the given anchor and checking the server's name.

    Raises:
        DocumentError: the anchor cannot be used.
    """
    raise NotImplementedError
