"""Session TLS material and the contexts of both peers."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from scripted.isolation_boundary import SESSION

from openshell.isolation.documents import DocumentError
from openshell.isolation.tls import client_context, issue_session_tls, server_context


def common_name(name: x509.Name) -> str:
    return str(name.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def test_the_material_is_what_the_contract_says() -> None:
    tls = issue_session_tls(SESSION)
    ca = x509.load_pem_x509_certificate(tls.trust_anchor_pem.encode())
    leaf = x509.load_pem_x509_certificate(tls.certificate_chain_pem.encode())
    assert tls.server_name == f"sandbox.{SESSION}.openshell.internal"
    assert common_name(ca.subject) == "OpenShell sandbox session CA"
    assert common_name(leaf.subject) == "OpenShell sandbox runtime"
    for certificate in (ca, leaf):
        assert isinstance(certificate.public_key(), Ed25519PublicKey)
        assert certificate.not_valid_before_utc == datetime(1975, 1, 1, tzinfo=UTC)
        assert certificate.not_valid_after_utc == datetime(4096, 1, 1, tzinfo=UTC)
        certificate.verify_directly_issued_by(ca)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [tls.server_name]
    usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH]
    key = load_pem_private_key(tls.private_key_pem.encode(), None)
    assert isinstance(key, Ed25519PrivateKey)
    assert key.public_key() == leaf.public_key()
    assert tls.private_key_pem.startswith("-----BEGIN PRIVATE KEY-----")


def test_sessions_share_nothing() -> None:
    one, two = issue_session_tls(SESSION), issue_session_tls(SESSION)
    assert one.trust_anchor_pem != two.trust_anchor_pem
    assert one.private_key_pem != two.private_key_pem


def handshake(client: ssl.SSLContext, server: ssl.SSLContext, name: str) -> ssl.SSLObject:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    peers = (
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    done = [False, False]
    while not all(done):
        for index, peer in enumerate(peers):
            if not done[index]:
                try:
                    peer.do_handshake()
                    done[index] = True
                except ssl.SSLWantReadError:
                    continue
    return peers[0]


def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext, str]:
    tls = issue_session_tls(SESSION)
    server = server_context(certificate_chain_pem=tls.certificate_chain_pem, private_key_pem=tls.private_key_pem)
    return client_context(trust_anchor_pem=tls.trust_anchor_pem), server, tls.server_name


def test_the_peers_meet_on_tls_1_3_and_h2() -> None:
    client, server, name = contexts()
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    peer = handshake(client, server, name)
    assert peer.version() == "TLSv1.3"
    assert peer.selected_alpn_protocol() == "h2"


def test_tls_1_2_is_refused_for_its_version() -> None:
    client, server, name = contexts()
    client.minimum_version = ssl.TLSVersion.TLSv1_2
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match="UNSUPPORTED_PROTOCOL"):
        handshake(client, server, name)


def test_another_name_and_another_anchor_are_refused() -> None:
    client, server, name = contexts()
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(client, server, "sandbox.other.openshell.internal")
    stranger = client_context(trust_anchor_pem=issue_session_tls(SESSION).trust_anchor_pem)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(stranger, server, name)


def test_the_systems_authorities_are_not_trusted() -> None:
    client, _, _ = contexts()
    assert len(client.get_ca_certs()) == 1


@pytest.mark.parametrize("session_id", ["", "x", SESSION.upper(), "00000000-0000-0000-0000-000000000000"])
def test_only_a_session_id_gets_material(session_id: str) -> None:
    with pytest.raises(DocumentError):
        issue_session_tls(session_id)


def test_unusable_material_is_named_without_its_content() -> None:
    one, two = issue_session_tls(SESSION), issue_session_tls(SESSION)
    with pytest.raises(DocumentError, match="cannot be used"):
        server_context(certificate_chain_pem=one.certificate_chain_pem, private_key_pem=two.private_key_pem)
    with pytest.raises(DocumentError, match="trust_anchor_pem"):
        client_context(trust_anchor_pem="nonsense")
