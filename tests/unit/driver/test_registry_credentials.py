"""Logins come from the docker config and its helpers, go to one registry, and are never seen."""

from __future__ import annotations

import base64
import json
import os
import select
import stat
from typing import TYPE_CHECKING, Any

import pytest

from driver_docker.registry_credentials import CredentialsError, RegistryCredentials, RegistryLogins

if TYPE_CHECKING:
    from pathlib import Path

REGISTRY = "127.0.0.1:5000"
PASSWORD = "correct-horse-battery"


def auth(username: str, password: str) -> str:
    return base64.b64encode(f"{username}:{password}".encode()).decode()


def logins(tmp_path: Path, config: Any, *, timeout: float = 10.0) -> RegistryLogins:
    content = config if isinstance(config, bytes) else json.dumps(config).encode()
    (tmp_path / "config.json").write_bytes(content)
    environment = {"DOCKER_CONFIG": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}", "MARK": str(tmp_path)}
    return RegistryLogins(tmp_path / "config.json", environment, helper_timeout_seconds=timeout)


def helper(tmp_path: Path, script: str, name: str = "test") -> None:
    program = tmp_path / f"docker-credential-{name}"
    program.write_text(f"#!/bin/sh\n{script}\n", "utf-8")
    program.chmod(stat.S_IRWXU)


def sent(found: RegistryCredentials | None) -> dict[str, str]:
    assert found is not None
    decoded: dict[str, str] = json.loads(base64.urlsafe_b64decode(found.header()))
    return decoded


@pytest.mark.parametrize(
    ("key", "registry", "address"),
    [
        (REGISTRY, REGISTRY, REGISTRY),
        (f"https://{REGISTRY}/v1/", REGISTRY, REGISTRY),
        ("https://index.docker.io/v1/", "docker.io", "https://index.docker.io/v1/"),
    ],
)
async def test_a_login_of_the_file_is_found_by_its_registry(
    tmp_path: Path, key: str, registry: str, address: str
) -> None:
    found = logins(tmp_path, {"auths": {"other:1": {"auth": auth("x", "y")}, key: {"auth": auth("ann", PASSWORD)}}})
    assert sent(await found.find(registry)) == {"username": "ann", "password": PASSWORD, "serveraddress": address}


@pytest.mark.parametrize("registry", ["127.0.0.1:5001", "127.0.0.1", "docker.io", "evil.127.0.0.1:5000"])
async def test_a_login_goes_to_no_other_registry(tmp_path: Path, registry: str) -> None:
    found = logins(tmp_path, {"auths": {REGISTRY: {"auth": auth("ann", PASSWORD)}}})
    assert await found.find(registry) is None


async def test_tokens_and_plain_fields_are_sent_as_what_they_are(tmp_path: Path) -> None:
    entries = {
        "a:1": {"auth": auth("ann", ""), "identitytoken": "refresh-token-value"},
        "b:1": {"username": "bob", "password": PASSWORD},
        "c:1": {"registrytoken": "bearer-token-value"},
        "d:1": {},
        "e:1": {"auth": auth("colon", "a:b:c")},
    }
    found = logins(tmp_path, {"auths": entries})
    assert sent(await found.find("a:1")) == {"identitytoken": "refresh-token-value", "serveraddress": "a:1"}
    assert sent(await found.find("b:1")) == {"username": "bob", "password": PASSWORD, "serveraddress": "b:1"}
    assert sent(await found.find("c:1")) == {"registrytoken": "bearer-token-value", "serveraddress": "c:1"}
    assert await found.find("d:1") is None
    assert sent(await found.find("e:1"))["password"] == "a:b:c"


async def test_a_login_is_found_without_a_restart(tmp_path: Path) -> None:
    found = logins(tmp_path, {})
    assert await found.find(REGISTRY) is None
    logins(tmp_path, {"auths": {REGISTRY: {"auth": auth("ann", PASSWORD)}}})
    assert sent(await found.find(REGISTRY))["username"] == "ann"


@pytest.mark.parametrize("field", ["credsStore", "credHelpers"])
async def test_a_helper_is_asked_on_standard_input(tmp_path: Path, field: str) -> None:
    answer = json.dumps({"ServerURL": "x", "Username": "ann", "Secret": PASSWORD})
    helper(tmp_path, f'[ "$*" = get ] || exit 9\ncat > "$MARK/asked"\necho \'{answer}\'')
    found = logins(tmp_path, {field: "test" if field == "credsStore" else {REGISTRY: "test"}})
    assert sent(await found.find(REGISTRY)) == {"username": "ann", "password": PASSWORD, "serveraddress": REGISTRY}
    assert (tmp_path / "asked").read_text("utf-8") == REGISTRY


async def test_a_helpers_token_user_means_an_identity_token(tmp_path: Path) -> None:
    helper(tmp_path, """echo '{"Username": "<token>", "Secret": "refresh-token-value"}'""")
    found = await logins(tmp_path, {"credsStore": "test"}).find("docker.io")
    assert sent(found) == {"identitytoken": "refresh-token-value", "serveraddress": "https://index.docker.io/v1/"}


async def test_a_helper_of_another_registry_is_not_asked(tmp_path: Path) -> None:
    helper(tmp_path, 'touch "$MARK/asked"')
    assert await logins(tmp_path, {"credHelpers": {"other:1": "test"}}).find(REGISTRY) is None
    assert not (tmp_path / "asked").exists()


async def test_a_helper_that_knows_nothing_is_no_error(tmp_path: Path) -> None:
    helper(tmp_path, "echo 'credentials not found in native keychain'; exit 1")
    assert await logins(tmp_path, {"credsStore": "test"}).find(REGISTRY) is None


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (f"echo {PASSWORD}; echo {PASSWORD} >&2; exit 3", "docker-credential-test failed with 3"),
        (f"echo {PASSWORD}", "gave no credentials"),
        ("echo '{}'", "gave no credentials"),
        ("head -c 100000 /dev/zero", "more than 65536 bytes"),
        ("kill -9 $$", "failed with -9"),
    ],
)
async def test_a_helper_that_fails_is_named_and_not_quoted(tmp_path: Path, script: str, words: str) -> None:
    helper(tmp_path, script)
    with pytest.raises(CredentialsError, match=words) as failed:
        await logins(tmp_path, {"credsStore": "test"}).find(REGISTRY)
    assert REGISTRY in failed.value.message or "bytes" in failed.value.message
    assert PASSWORD not in failed.value.message


async def test_a_helper_that_hangs_is_ended_with_all_it_started(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "held")
    reading = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    try:
        helper(tmp_path, 'exec 9>"$MARK/held"; echo up >&9; sleep 1000 & wait')
        with pytest.raises(CredentialsError, match=r"did not answer within 1 s"):
            await logins(tmp_path, {"credsStore": "test"}, timeout=1.0).find(REGISTRY)
        assert os.read(reading, 16) == b"up\n"
        # The end of the file comes when the last of them is dead.
        assert select.select([reading], [], [], 10.0)[0]
        assert os.read(reading, 16) == b""
    finally:
        os.close(reading)


@pytest.mark.parametrize("name", ["../evil", "a/b", "", "-x", "a b", "$(touch x)", "x;y"])
async def test_a_helper_is_a_program_name_and_nothing_else(tmp_path: Path, name: str) -> None:
    found = logins(tmp_path, {"credsStore": name})
    if not name:
        assert await found.find(REGISTRY) is None
        return
    with pytest.raises(CredentialsError, match="no program name"):
        await found.find(REGISTRY)


async def test_a_missing_helper_names_itself_and_the_file(tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match=r"docker-credential-none, which .*config\.json names"):
        await logins(tmp_path, {"credsStore": "none"}).find(REGISTRY)


@pytest.mark.parametrize(
    "content",
    [
        b"{" + PASSWORD.encode(),
        b"[]",
        b"\xff",
        b" " * (1024 * 1024 + 1),
        json.dumps({"auths": {REGISTRY: {"auth": PASSWORD}}}).encode(),
    ],
)
async def test_a_file_that_cannot_be_used_is_named_and_not_quoted(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(CredentialsError, match=r"docker config /.*config\.json") as failed:
        await logins(tmp_path, content).find(REGISTRY)
    assert PASSWORD not in failed.value.message


@pytest.mark.parametrize("config", [{}, {"auths": None}, {"auths": {REGISTRY: "x"}}, {"credHelpers": [], "auths": []}])
async def test_a_file_without_logins_gives_none(tmp_path: Path, config: dict[str, Any]) -> None:
    assert await logins(tmp_path, config).find(REGISTRY) is None


async def test_no_file_and_no_home_give_no_login(tmp_path: Path) -> None:
    assert await RegistryLogins.of({"HOME": str(tmp_path)}).find(REGISTRY) is None
    assert await RegistryLogins.of({}).find(REGISTRY) is None
    assert RegistryLogins.of({"HOME": "/h", "DOCKER_CONFIG": "/d"}).place == "/d/config.json"
    assert RegistryLogins.of({"HOME": "/h"}).place == "/h/.docker/config.json"


def test_nothing_of_a_credential_is_represented() -> None:
    found = RegistryCredentials(
        registry=REGISTRY,
        server_address=REGISTRY,
        username="ann",
        password=PASSWORD,
        identity_token="refresh-token-value",
        registry_token="bearer-token-value",
    )
    shown = repr(found)
    assert REGISTRY in shown
    for secret in (*found.secrets, "ann"):
        assert secret not in shown


@pytest.mark.parametrize("name", ["http://[bad", "[bad", "https://[::1", "http://[v1.x]y"])
async def test_a_key_that_is_no_address_hides_no_other_login(tmp_path: Path, name: str) -> None:
    entries = {name: {"auth": auth("bob", "other")}, f"https://{REGISTRY}/v1/": {"auth": auth("ann", PASSWORD)}}
    found = logins(tmp_path, {"auths": entries})
    assert sent(await found.find(REGISTRY))["username"] == "ann"
    assert await found.find("docker.io") is None
