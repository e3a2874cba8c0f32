"""Who owns the state, who signs, who calls."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import jwt
import pytest
from pydantic import ValidationError

from gateway_embedded.auth import SandboxPrincipal, User, authenticate
from gateway_embedded.config import GatewayConfig
from gateway_embedded.errors import ConfigurationError, PermissionDeniedError, UnauthenticatedError
from gateway_embedded.listen_address import split_address
from gateway_embedded.rpc_table import AuthMode
from gateway_embedded.sandboxes import Phase, Provisioning, SandboxRecord, SandboxStatus
from gateway_embedded.state_dir import StateDir
from gateway_embedded.tokens import SigningKey, TokenAuthority, new_launch
from openshell.isolation.credentials import LaunchAuthentication

NOW = datetime.now(UTC)
HOUR = timedelta(hours=1)
ID = "11111111-1111-4111-8111-111111111111"


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    return SigningKey.open(tmp_path / "key.pem")


def authority(key: SigningKey, gateway_id: str = "g") -> TokenAuthority:
    return TokenAuthority(gateway_id=gateway_id, key=key, lifetime=HOUR)


def test_a_state_folder_has_one_owner_and_one_user(tmp_path: Path) -> None:
    path = tmp_path / "a" / "state"
    folder = StateDir.claim(path)
    assert path.stat().st_mode & 0o777 == 0o700
    assert (path / "gateway.sqlite3").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigurationError, match="another gateway") as caught:
        StateDir.claim(path)
    assert caught.value.reason == "STATE_DIR_IN_USE"
    folder.release()
    StateDir.claim(path).release()


def test_state_folders_that_are_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    with pytest.raises(ConfigurationError, match=f"chmod 700 {shared}"):
        StateDir.claim(shared)
    link = tmp_path / "link"
    (tmp_path / "real").mkdir(mode=0o700)
    link.symlink_to(tmp_path / "real")
    with pytest.raises(ConfigurationError, match="symbolic link"):
        StateDir.claim(link)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigurationError, match="cannot be used"):
        StateDir.claim(file / "state")


def test_the_signing_key_is_made_once_and_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    first = SigningKey.open(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert SigningKey.open(path) == first
    assert "PRIVATE" not in repr(first)
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="0600"):
        SigningKey.open(path)
    path.chmod(0o600)
    path.write_text("nonsense")
    with pytest.raises(ConfigurationError, match="no readable private key"):
        SigningKey.open(path)


def test_a_launch_document_holds_two_tokens_that_differ_in_audience(key: SigningKey) -> None:
    issuer = authority(key)
    launch = new_launch()
    tokens = issuer.mint(ID, launch, now=NOW)
    document = LaunchAuthentication.from_json(issuer.launch_authentication(launch, tokens))
    assert document.gateway_id == "g"
    assert document.supervisor.session_id == launch.session_id
    assert document.supervisor.runtime_generation == launch.generation
    assert [item.key_id for item in document.verification_keys] == [key.key_id]
    audiences = {
        "gateway": ("openshell-gateway", "openshell-gateway-session+jwt", tokens.gateway_token),
        "sandbox": ("openshell-sandbox", "openshell-sandbox-session+jwt", tokens.sandbox_token),
    }
    for audience, typ, token in audiences.values():
        claims = jwt.decode(token, key.public_key_pem, algorithms=["EdDSA"], audience=audience)
        assert jwt.get_unverified_header(token) == {"alg": "EdDSA", "kid": key.key_id, "typ": typ}
        assert claims["sandbox_id"] == ID
        assert claims["exp"] - claims["iat"] == 3600
    assert tokens.gateway_token not in repr(tokens)
    raw = json.loads(issuer.launch_authentication(launch, tokens))
    assert set(raw) == {"supervisor", "gateway_id", "verification_keys"}
    assert all(isinstance(byte, int) for byte in raw["verification_keys"][0]["public_key_pem"])


def bearer(token: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "x"), ("authorization", f"Bearer {token}")]


def test_supervisors_are_known_by_their_token_alone(key: SigningKey, tmp_path: Path) -> None:
    issuer = authority(key)
    launch = new_launch()
    tokens = issuer.mint(ID, launch, now=NOW)
    principal = SandboxPrincipal(sandbox_id=ID, generation=launch.generation, auth_epoch=1)
    for mode in (AuthMode.SANDBOX, AuthMode.DUAL):
        assert authenticate(mode, bearer(tokens.gateway_token), issuer) == principal
    with pytest.raises(PermissionDeniedError):
        authenticate(AuthMode.BEARER, bearer(tokens.gateway_token), issuer)
    with pytest.raises(PermissionDeniedError):
        principal.require("another")
    stranger = authority(SigningKey.open(tmp_path / "other.pem"))
    expired = issuer.mint(ID, launch, now=NOW - 2 * HOUR)
    for headers in (
        [],
        bearer(tokens.sandbox_token),
        bearer("nonsense"),
        bearer(""),
        [("authorization", tokens.gateway_token)],
        bearer(stranger.mint(ID, launch, now=NOW).gateway_token),
        bearer(authority(key, "another").mint(ID, launch, now=NOW).gateway_token),
        bearer(expired.gateway_token),
        bearer(tokens.gateway_token[:-3]),
    ):
        with pytest.raises(UnauthenticatedError):
            authenticate(AuthMode.SANDBOX, headers, issuer)


@pytest.mark.parametrize("mode", [AuthMode.BEARER, AuthMode.DUAL])
def test_a_supervisor_without_a_valid_token_is_never_taken_for_a_user(
    mode: AuthMode, key: SigningKey, tmp_path: Path
) -> None:
    issuer, launch = authority(key), new_launch()
    expired = issuer.mint(ID, launch, now=NOW - 2 * HOUR)
    foreign = authority(SigningKey.open(tmp_path / "other.pem"), "other").mint(ID, launch, now=NOW)
    for token in (expired.gateway_token, foreign.gateway_token, foreign.sandbox_token, expired.gateway_token[:-3]):
        with pytest.raises(UnauthenticatedError, match="valid gateway token"):
            authenticate(mode, bearer(token), issuer)


def test_a_gateway_token_that_never_expires_is_the_operators_choice(key: SigningKey) -> None:
    launch = new_launch()
    lasting = TokenAuthority(gateway_id="g", key=key, lifetime=HOUR, nonexpiring_gateway_tokens=True)
    tokens = lasting.mint(ID, launch, now=NOW - 1000 * HOUR)
    assert jwt.decode(tokens.gateway_token, options={"verify_signature": False})["exp"] == 0
    assert lasting.verify(f"Bearer {tokens.gateway_token}").runtime_generation == launch.generation
    document = LaunchAuthentication.from_json(lasting.launch_authentication(launch, tokens)).supervisor
    assert document.gateway_expires_at == 0
    assert document.sandbox_expires_at == int((NOW - 999 * HOUR).timestamp())
    with pytest.raises(UnauthenticatedError, match="nonexpiring"):
        authority(key).verify(f"Bearer {tokens.gateway_token}")


def test_credentials_of_an_earlier_launch_are_worth_nothing() -> None:
    launch = new_launch(auth_epoch=2)
    record = SandboxRecord(
        id=ID,
        name="alpha",
        workspace="default",
        created_at=NOW,
        spec=b"",
        launch=launch,
        status=SandboxStatus(phase=Phase.READY),
        provisioning=Provisioning(attempt_id="a", preparation_deadline=NOW),
    )
    current = SandboxPrincipal(sandbox_id=ID, generation=launch.generation, auth_epoch=2)
    current.require_launch(record)
    for stale in (replace(current, auth_epoch=1), replace(current, generation=new_launch().generation)):
        with pytest.raises(UnauthenticatedError, match="earlier launch of sandbox 'alpha'"):
            stale.require_launch(record)


def test_users_need_no_token(key: SigningKey) -> None:
    for mode in (AuthMode.BEARER, AuthMode.DUAL, AuthMode.UNAUTHENTICATED):
        assert authenticate(mode, [], authority(key)) == User()
        for theirs in (
            "someone-elses",
            jwt.encode({"sub": "user"}, "k" * 32),
            "x" * 100_000,
            "." * 9,
            "W10.",
            "\u00e9.",
            "W" * 12_000 + ".",
        ):
            assert authenticate(mode, bearer(theirs), authority(key)) == User()


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "example.org", ""])
def test_only_loopback_is_listened_on(host: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="loopback"):
        GatewayConfig(listen_host=host, state_dir=tmp_path, compute_driver_socket=tmp_path / "s")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_addresses(host: str, tmp_path: Path) -> None:
    config = GatewayConfig(listen_host=host, state_dir=tmp_path, compute_driver_socket=tmp_path / "s")
    assert config.endpoint(1) == ("http://[::1]:1" if host == "::1" else f"http://{host}:1")


def test_a_socket_path_that_no_socket_can_have_is_refused() -> None:
    fits = Path("/") / ("s" * 106)
    assert GatewayConfig(state_dir=Path("/s"), compute_driver_socket=fits).compute_driver_socket == fits
    for path in (f"/{'s' * 107}", f"/{'é' * 54}"):
        with pytest.raises(ValidationError, match="107"):
            GatewayConfig(state_dir=Path("/s"), compute_driver_socket=Path(path))


def test_unknown_keys_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="colour"):
        GatewayConfig(state_dir=tmp_path, compute_driver_socket=tmp_path / "s", colour="red")  # type: ignore[call-arg]


def test_addresses() -> None:
    assert split_address("127.0.0.1:0") == ("127.0.0.1", 0)
    assert split_address("[::1]:80") == ("::1", 80)
    for text in ("127.0.0.1", ":x", "80", "host:\uff18"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            split_address(text)
