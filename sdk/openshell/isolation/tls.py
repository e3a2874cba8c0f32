"""TLS of one launch session: its material, and the contexts of both peers (compute-driver contract 5.6)."""

from __future__ import annotations

import os
import ssl
from contextlib import ExitStack
from dataclasses import dataclass, field

from openshell.isolation.errors import DocumentError
from openshell.isolation.json_fields import check_session_id

ALPN = "h2"


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


def session_server_name(session_id: str) -> str:
    """The server name of a session.

    Raises:
        DocumentError: the session id is no canonical, non-nil UUID.
    """
    return f"sandbox.{check_session_id(session_id, 'session_id')}.openshell.internal"


def issue_session_tls(session_id: str) -> SessionTls:
    """Make an Ed25519 CA, sign one server leaf with it and forget the CA's key.

    Validity is 1975 to 4096 on purpose: time is carried by the token, and a sandbox's clock may be wrong.

    Raises:
        DocumentError: the session id is no canonical, non-nil UUID.
    """
    server_name = session_server_name(session_id)
    # Only whoever launches makes certificates; the peers of a boundary do without what it takes.
    from openshell.isolation.session_certificates import issue

    issued = issue(server_name)
    return SessionTls(
        server_name=server_name,
        trust_anchor_pem=issued.trust_anchor_pem,
        certificate_chain_pem=issued.certificate_chain_pem,
        private_key_pem=issued.private_key_pem,
    )


def server_context(*, certificate_chain_pem: str, private_key_pem: str) -> ssl.SSLContext:
    """A server context: TLS 1.3 only, ALPN ``h2``, no session tickets.

    Raises:
        DocumentError: the chain or the key cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _restrict(context)
    context.num_tickets = 0
    with ExitStack() as stack:
        # load_cert_chain reads files only; anonymous memory keeps the key off every file system.
        chain = _memory_file(stack, "openshell-chain", certificate_chain_pem)
        key = _memory_file(stack, "openshell-key", private_key_pem)
        try:
            context.load_cert_chain(chain, key)
        except (ssl.SSLError, ValueError):
            raise DocumentError("listener.tls", "the certificate chain and the private key cannot be used") from None
    return context


def client_context(*, trust_anchor_pem: str) -> ssl.SSLContext:
    """A client context: TLS 1.3 only, ALPN ``h2``, trusting only the given anchor and checking the server's name.

    Raises:
        DocumentError: the anchor cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _restrict(context)
    context.hostname_checks_common_name = False
    try:
        context.load_verify_locations(cadata=trust_anchor_pem)
    except (ssl.SSLError, ValueError):
        raise DocumentError("tls.trust_anchor_pem", "is not a PEM certificate") from None
    return context


def _restrict(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([ALPN])


def _memory_file(stack: ExitStack, name: str, content: str) -> str:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    stack.callback(os.close, descriptor)
    remaining = memoryview(content.encode("utf-8"))
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]
    return f"/proc/self/fd/{descriptor}"
