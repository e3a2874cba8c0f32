"""TLS of one launch session: its material, and the contexts of both peers (compute-driver contract 5.6)."""

from __future__ import annotations

import os
import ssl
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from openshell.isolation.errors import DocumentError
from openshell.isolation.json_fields import check_session_id

CA_COMMON_NAME = "OpenShell sandbox session CA"
LEAF_COMMON_NAME = "OpenShell sandbox runtime"
NOT_BEFORE = datetime(1975, 1, 1, tzinfo=UTC)
NOT_AFTER = datetime(4096, 1, 1, tzinfo=UTC)
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
    ca_key = Ed25519PrivateKey.generate()
    leaf_key = Ed25519PrivateKey.generate()
    ca = _certificate(CA_COMMON_NAME, ca_key.public_key(), CA_COMMON_NAME, ca_key)
    ca_certificate = (
        ca.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(key_cert_sign=True), critical=True)
        .sign(ca_key, None)
    )
    leaf = _certificate(LEAF_COMMON_NAME, leaf_key.public_key(), CA_COMMON_NAME, ca_key)
    leaf_certificate = (
        leaf.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(key_cert_sign=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(server_name)]), critical=False)
        .sign(ca_key, None)
    )
    return SessionTls(
        server_name=server_name,
        trust_anchor_pem=_pem(ca_certificate),
        certificate_chain_pem=_pem(leaf_certificate),
        private_key_pem=leaf_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode("ascii"),
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


def _certificate(
    subject: str, public_key: Ed25519PublicKey, issuer: str, issuer_key: Ed25519PrivateKey
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOT_BEFORE)
        .not_valid_after(NOT_AFTER)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _key_usage(*, key_cert_sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not key_cert_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=key_cert_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")
