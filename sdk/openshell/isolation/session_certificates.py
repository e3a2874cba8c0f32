"""The certificates of one launch session (compute-driver contract 5.6); apart from `tls`, which both peers import."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_COMMON_NAME = "OpenShell sandbox session CA"
LEAF_COMMON_NAME = "OpenShell sandbox runtime"
NOT_BEFORE = datetime(1975, 1, 1, tzinfo=UTC)
NOT_AFTER = datetime(4096, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedCertificates:
    """A session CA, the leaf that it signed, and the leaf's key (secret), all PEM."""

    trust_anchor_pem: str = field(repr=False)
    certificate_chain_pem: str = field(repr=False)
    private_key_pem: str = field(repr=False)


def issue(server_name: str) -> IssuedCertificates:
    """Make an Ed25519 CA, sign a server leaf of this name with it and forget the CA's key."""
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
    return IssuedCertificates(
        trust_anchor_pem=_pem(ca_certificate),
        certificate_chain_pem=_pem(leaf_certificate),
        private_key_pem=leaf_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode("ascii"),
    )


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
