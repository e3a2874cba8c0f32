"""Session tokens: what is accepted, and that each rule alone refuses."""

from __future__ import annotations

import base64
import json
import time
import uuid

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ed448
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from hypothesis import given
from hypothesis import strategies as st
from scripted.isolation_boundary import GATEWAY, GENERATION, SANDBOX, Keys, claims

from openshell.isolation.documents import DocumentError, VerificationKey
from openshell.isolation.errors import TokenError
from openshell.isolation.tokens import (
    TokenProfile,
    TokenVerifier,
    claims_to_be_session_token,
    mint_gateway_token,
    mint_sandbox_token,
    read_auth_epoch,
)
from openshell.status import StatusCode

KEYS = Keys.generate()
NOW = 1_800_000_000


def verifier(profile: TokenProfile = TokenProfile.SANDBOX, **changes: object) -> TokenVerifier:
    arguments: dict[str, object] = {
        "profile": profile,
        "gateway_id": GATEWAY,
        "keys": (KEYS.verification,),
        "sandbox_id": SANDBOX,
        "runtime_generation": GENERATION,
        "clock": lambda: float(NOW),
        **changes,
    }
    return TokenVerifier(**arguments)  # type: ignore[arg-type]


def payload(**changes: object) -> dict[str, object]:
    members: dict[str, object] = {
        "iss": f"openshell-gateway:{GATEWAY}",
        "sub": f"spiffe://openshell/sandbox/{SANDBOX}",
        "aud": "openshell-sandbox",
        "iat": NOW,
        "exp": NOW + 600,
        "jti": str(uuid.uuid4()),
        "sandbox_id": SANDBOX,
        "runtime_generation": GENERATION,
        "auth_epoch": 3,
        "component": "openshell-supervisor",
        **changes,
    }
    return {k: v for k, v in members.items() if v is not None}


def signed(members: dict[str, object], headers: dict[str, object] | None = None, key: str = KEYS.private_pem) -> str:
    header: dict[str, object] = {"kid": "key-1", "typ": "openshell-sandbox-session+jwt", **(headers or {})}
    return jwt.encode(members, load_pem_private_key(key.encode(), None), algorithm="EdDSA", headers=header)  # type: ignore[arg-type]


def test_a_minted_token_is_accepted_with_all_its_claims() -> None:
    wanted = claims(issued_at=NOW, expires_at=NOW + 3600, auth_epoch=2**64 - 1)
    token = mint_sandbox_token(wanted, key_id="key-1", private_key_pem=KEYS.private_pem)
    assert verifier().verify(token) == wanted
    assert jwt.get_unverified_header(token) == {
        "alg": "EdDSA",
        "kid": "key-1",
        "typ": "openshell-sandbox-session+jwt",
    }
    assert verifier().verify_authorization(f"Bearer {token}") == wanted


def test_the_two_profiles_do_not_pass_for_each_other() -> None:
    wanted = claims(issued_at=NOW, expires_at=NOW + 60)
    gateway = mint_gateway_token(wanted, key_id="key-1", private_key_pem=KEYS.private_pem)
    assert jwt.get_unverified_header(gateway)["typ"] == "openshell-gateway-session+jwt"
    assert verifier(TokenProfile.GATEWAY).verify(gateway) == wanted
    with pytest.raises(TokenError, match="typ"):
        verifier().verify(gateway)


def test_the_hand_made_payload_is_a_good_one() -> None:
    assert verifier().verify(signed(payload())).auth_epoch == 3


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"iss": "openshell-gateway:other"}, "iss"),
        ({"sub": "spiffe://openshell/sandbox/other"}, "sub"),
        ({"aud": "openshell-gateway"}, "aud"),
        ({"aud": ["openshell-sandbox"]}, "aud"),
        ({"component": "agent"}, "component"),
        ({"sandbox_id": "other", "sub": "spiffe://openshell/sandbox/other"}, "sandbox_id"),
        ({"runtime_generation": "generation-2"}, "runtime_generation"),
        ({"jti": "1"}, "jti"),
        ({"jti": None}, "jti"),
        ({"auth_epoch": 0}, "auth_epoch"),
        ({"auth_epoch": 2**64}, "auth_epoch"),
        ({"auth_epoch": "3"}, "auth_epoch"),
        ({"auth_epoch": True}, "auth_epoch"),
        ({"iat": NOW + 31}, "iat lies in the future"),
        ({"iat": NOW + 600, "exp": NOW + 600}, "later than iat"),
        ({"exp": NOW + 3601}, "lifetime"),
        ({"iat": NOW - 600, "exp": NOW - 30}, "expired"),
        ({"exp": 0}, "nonexpiring"),
        ({"exp": None}, "exp"),
        ({"exp": -1}, "exp"),
        ({"session_id": "s"}, "session_id is not known"),
        ({"nbf": NOW}, "nbf is not known"),
    ],
)
def test_each_claim_rule_refuses(change: dict[str, object], rule: str) -> None:
    with pytest.raises(TokenError, match=rule) as caught:
        verifier().verify(signed(payload(**change)))
    assert caught.value.status is StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("headers", "rule"),
    [
        ({"typ": "JWT"}, "typ"),
        ({"kid": "key-2"}, "kid"),
        ({"crit": ["b64"]}, "nothing else|not a JWT"),
        ({"jku": "https://example.test"}, "nothing else"),
    ],
)
def test_each_header_rule_refuses(headers: dict[str, object], rule: str) -> None:
    with pytest.raises(TokenError, match=rule):
        verifier().verify(signed(payload(), headers))


def test_other_algorithms_are_refused() -> None:
    header = {"kid": "key-1", "typ": "openshell-sandbox-session+jwt"}
    for token in (
        jwt.encode(payload(), "s" * 32, algorithm="HS256", headers=header),
        jwt.encode(payload(), "", algorithm="none", headers=header),
    ):
        with pytest.raises(TokenError, match="alg must be EdDSA"):
            verifier().verify(token)


def test_a_signature_of_another_key_is_refused() -> None:
    with pytest.raises(TokenError, match="signature"):
        verifier().verify(signed(payload(), key=Keys.generate().private_pem))


def test_clock_skew_of_thirty_seconds_is_tolerated() -> None:
    verifier().verify(signed(payload(iat=NOW + 30)))
    verifier().verify(signed(payload(iat=NOW - 600, exp=NOW - 29)))


def test_nonexpiring_tokens_only_where_the_operator_allows_them() -> None:
    token = signed(payload(exp=0, iat=NOW - 10_000_000))
    assert verifier(allow_nonexpiring=True).verify(token).expires_at == 0


def test_an_older_epoch_is_refused() -> None:
    verifier(minimum_auth_epoch=3).verify(signed(payload()))
    with pytest.raises(TokenError, match="auth_epoch is older"):
        verifier(minimum_auth_epoch=4).verify(signed(payload()))


def test_any_sandbox_where_none_is_fixed() -> None:
    token = signed(payload(sandbox_id="other", sub="spiffe://openshell/sandbox/other", runtime_generation="g2"))
    found = verifier(sandbox_id=None, runtime_generation=None).verify(token)
    assert (found.sandbox_id, found.runtime_generation) == ("other", "g2")


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic abc", "Bearer a.b.c", "Bearer " + "x" * 20_000]
)
def test_what_is_no_bearer_token_is_refused(header: str | None) -> None:
    with pytest.raises(TokenError):
        verifier().verify_authorization(header)


def test_refusals_do_not_quote_the_token() -> None:
    token = signed(payload(iss="openshell-gateway:other"))
    with pytest.raises(TokenError) as caught:
        verifier().verify(token)
    assert token not in str(caught.value)
    assert token.split(".")[2] not in repr(caught.value)


def test_only_ed25519_keys_are_taken() -> None:
    other = ed448.Ed448PrivateKey.generate().public_key()
    pem = other.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    for bad in (pem, "nonsense"):
        with pytest.raises(DocumentError, match="public_key_pem"):
            verifier(keys=(VerificationKey(key_id="k", public_key_pem=bad),))
    with pytest.raises(DocumentError, match="private_key_pem"):
        mint_sandbox_token(claims(), key_id="k", private_key_pem="nonsense")


def test_what_could_not_be_verified_is_not_minted() -> None:
    now = int(time.time())
    for change in ({"expires_at": now - 1}, {"expires_at": now + 4000}, {"auth_epoch": 0}, {"token_id": "x"}):
        with pytest.raises(DocumentError):
            claims(issued_at=now, **change)


@given(st.integers(min_value=1, max_value=2**64 - 1))
def test_a_holder_reads_the_epoch_of_its_token(epoch: int) -> None:
    assert read_auth_epoch(signed(payload(auth_epoch=epoch))) == epoch


@given(st.text() | st.builds(".".join, st.lists(st.text(alphabet="eyJ9-_=+/A0"), min_size=3, max_size=4)))
def test_a_holder_of_nonsense_is_told(token: str) -> None:
    with pytest.raises(TokenError):
        read_auth_epoch(token)


@pytest.mark.parametrize("members", [{"auth_epoch": True}, {"auth_epoch": "1"}, {}])
def test_a_holder_of_a_token_without_an_epoch_is_told(members: dict[str, object]) -> None:
    with pytest.raises(TokenError, match="auth_epoch"):
        read_auth_epoch(jwt.encode(members, "k" * 32))


@pytest.mark.parametrize("profile", TokenProfile)
def test_a_session_token_is_known_by_its_header_valid_or_not(profile: TokenProfile) -> None:
    token = jwt.encode({}, "k" * 32, headers={"typ": profile.typ})
    assert claims_to_be_session_token(token)
    assert claims_to_be_session_token(token.partition(".")[0] + ".")
    assert not claims_to_be_session_token(token.partition(".")[0])


@pytest.mark.parametrize("headers", [{}, {"typ": "other+jwt"}, {"typ": ["openshell-gateway-session+jwt"]}])
def test_another_token_does_not_claim_to_be_one(headers: dict[str, object]) -> None:
    header = base64.urlsafe_b64encode(json.dumps(headers).encode()).decode().rstrip("=")
    assert not claims_to_be_session_token(f"{header}.e30.c2ln")


@given(st.text() | st.builds(".".join, st.lists(st.text(alphabet="eyJ9-_=+/A0W1"), min_size=2, max_size=4)))
def test_nonsense_does_not_claim_to_be_one(token: str) -> None:
    assert not claims_to_be_session_token(token)


def test_a_header_without_end_is_not_read() -> None:
    headers = {"typ": TokenProfile.GATEWAY.typ, "x": "x" * 2**14}
    assert not claims_to_be_session_token(jwt.encode({}, "k" * 32, headers=headers))
