"""Which engine: precedence of configuration, environment, contexts and the usual places, with clean environments."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from driver_docker.config_sources import load_config
from driver_docker.engine import EngineIncompatibleError, EngineUnreachableError
from driver_docker.engine_address import candidates, find_engine
from driver_docker.engine_wire import engine_info
from driver_docker.errors import ConfigurationError

USUAL = ["unix:///var/run/docker.sock"]


def urls(environment: dict[str, str], **config: Any) -> list[str]:
    loaded = load_config({"bind_socket": Path("/run/x/d.sock")} | config, environment={})
    return [address.url for address in candidates(loaded, environment)]


def make_context(folder: Path, name: str, host: str, *, certificates: bool = False, skip: bool = False) -> None:
    digest = hashlib.sha256(name.encode()).hexdigest()
    meta = folder / "contexts" / "meta" / digest
    meta.mkdir(parents=True)
    endpoint = {"Host": host, "SkipTLSVerify": skip}
    (meta / "meta.json").write_text(json.dumps({"Name": name, "Endpoints": {"docker": endpoint}}))
    if certificates:
        tls = folder / "contexts" / "tls" / digest / "docker"
        tls.mkdir(parents=True)
        for file in ("ca.pem", "cert.pem", "key.pem"):
            (tls / file).touch()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, USUAL),
        ({"HOME": "/h"}, [*USUAL, "unix:///h/.docker/run/docker.sock"]),
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, [*USUAL, "unix:///run/user/7/docker.sock"]),
        ({"DOCKER_HOST": "unix:///e.sock"}, ["unix:///e.sock", *USUAL]),
        ({"DOCKER_HOST": "unix:///var/run/docker.sock"}, USUAL),
        ({"DOCKER_HOST": ""}, USUAL),
        ({"DOCKER_HOST": "tcp://10.0.0.1:2376"}, ["tcp://10.0.0.1:2376"]),
        ({"DOCKER_HOST": "ssh://me@there", "HOME": "/h"}, ["ssh://me@there"]),
        ({"DOCKER_CONTEXT": "default"}, USUAL),
        ({"DOCKER_HOST": "unix:///e.sock", "DOCKER_CONTEXT": "nowhere"}, ["unix:///e.sock", *USUAL]),
    ],
)
def test_field_report_48_precedence_in_the_environment(environment: dict[str, str], expected: list[str]) -> None:
    assert urls({"DOCKER_CONFIG": "/nonexistent"} | environment) == expected


def test_field_report_48_what_is_configured_is_tried_alone() -> None:
    environment = {"DOCKER_HOST": "unix:///e.sock", "DOCKER_CONTEXT": "nowhere", "DOCKER_TLS_VERIFY": "1"}
    assert urls(environment, socket_path="/own.sock") == ["unix:///own.sock"]
    loaded = load_config(
        {"bind_socket": Path("/run/x/d.sock"), "socket_path": "tcp://10.0.0.1:2376"}, environment=environment
    )
    (address,) = candidates(loaded, environment)
    assert address.tls is None


@pytest.mark.parametrize("ambient", [{"DOCKER_TLS_VERIFY": "1"}, {"DOCKER_TLS": "1"}, {"DOCKER_CERT_PATH": "/c"}])
def test_field_report_48_tls_variables_mean_nothing_for_a_unix_socket(ambient: dict[str, str]) -> None:
    environment = {"DOCKER_HOST": "unix:///e.sock", "DOCKER_CONFIG": "/nonexistent"} | ambient
    loaded = load_config({"bind_socket": Path("/run/x/d.sock")}, environment={})
    assert [address.tls for address in candidates(loaded, environment)] == [None, None]


def test_field_report_48_tls_of_docker_host_is_verified_or_refused(tmp_path: Path) -> None:
    loaded = load_config({"bind_socket": Path("/run/x/d.sock")}, environment={})
    host = {"DOCKER_HOST": "tcp://10.0.0.1:2376", "DOCKER_CERT_PATH": str(tmp_path)}
    (address,) = candidates(loaded, host | {"DOCKER_TLS_VERIFY": "1"})
    assert address.tls is not None
    assert (address.tls.ca, address.tls.certificate) == (tmp_path / "ca.pem", None)
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).touch()
    (address,) = candidates(loaded, host | {"DOCKER_TLS_VERIFY": "1"})
    assert address.tls is not None
    assert address.tls.key == tmp_path / "key.pem"
    with pytest.raises(ConfigurationError, match="DOCKER_TLS_VERIFY=1"):
        candidates(loaded, host | {"DOCKER_TLS": "1"})


@pytest.mark.parametrize("file", ["ca.pem", "cert.pem", "key.pem"])
def test_a_certificate_that_cannot_be_looked_at_is_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """Without its CA, a connection that is meant to be encrypted would be tried in the clear."""
    make_context(tmp_path, "far", "tcp://10.0.0.1:2376", certificates=True)
    loaded = load_config({"bind_socket": Path("/run/x/d.sock")}, environment={})
    real = os.stat

    def refuse(path: Any, **kwargs: Any) -> os.stat_result:
        if str(path).endswith(file):
            raise PermissionError(13, "Permission denied")
        return real(path, **kwargs)

    monkeypatch.setattr("os.stat", refuse)
    with pytest.raises(ConfigurationError, match=f"{file} cannot be looked at: Permission denied"):
        candidates(loaded, {"DOCKER_CONFIG": str(tmp_path), "DOCKER_CONTEXT": "far"})
    if file != "ca.pem":
        host = {"DOCKER_HOST": "tcp://10.0.0.1:2376", "DOCKER_CERT_PATH": str(tmp_path), "DOCKER_TLS_VERIFY": "1"}
        (tmp_path / "cert.pem").touch()
        with pytest.raises(ConfigurationError, match=f"{file} cannot be looked at: Permission denied"):
            candidates(loaded, host)


def test_field_report_48_contexts_are_followed(tmp_path: Path) -> None:
    make_context(tmp_path, "near", "unix:///near.sock")
    make_context(tmp_path, "far", "tcp://far:2376", certificates=True)
    environment = {"DOCKER_CONFIG": str(tmp_path)}
    (tmp_path / "config.json").write_text('{"currentContext": "near"}')
    assert urls(environment) == ["unix:///near.sock", *USUAL]
    assert urls(environment | {"DOCKER_CONTEXT": "far"}) == ["tcp://far:2376"]
    assert urls(environment | {"DOCKER_CONTEXT": "default"}) == USUAL
    assert urls(environment | {"DOCKER_HOST": "unix:///e.sock"}) == ["unix:///e.sock", *USUAL]
    assert urls(environment, docker_context="far") == ["tcp://far:2376"]
    loaded = load_config({"bind_socket": Path("/run/x/d.sock"), "docker_context": "far"}, environment={})
    (address,) = candidates(loaded, environment)
    assert address.tls is not None
    assert address.tls.certificate is not None


@pytest.mark.parametrize(
    ("environment", "word"),
    [
        ({"DOCKER_CONTEXT": "missing"}, "does not exist"),
        ({"DOCKER_CONTEXT": "skips"}, "skips the verification"),
        ({"DOCKER_HOST": "npipe:////./pipe/docker"}, "DOCKER_HOST"),
        ({"DOCKER_HOST": "relative.sock"}, "DOCKER_HOST"),
        ({"DOCKER_HOST": "ssh://"}, r"DOCKER_HOST: ssh:// must be ssh://\[user@\]host"),
        ({"DOCKER_HOST": "ssh://there:port"}, "DOCKER_HOST: port is no port of ssh://there"),
        ({"DOCKER_HOST": "ssh://[::1"}, "DOCKER_HOST: the host of an ssh:// address is none"),
        ({"DOCKER_HOST": "ssh://-oProxyCommand=x"}, "DOCKER_HOST: ssh://"),
        ({"DOCKER_HOST": "ssh://me:s3cr3t@there"}, "DOCKER_HOST: ssh://there has a password"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(tmp_path: Path, environment: dict[str, str], word: str) -> None:
    make_context(tmp_path, "skips", "tcp://far:2376", skip=True)
    with pytest.raises(ConfigurationError, match=word):
        urls({"DOCKER_CONFIG": str(tmp_path)} | environment)


@pytest.mark.parametrize("scheme", ["tcp://", "http://", "https://", "TCP://", ""])
def test_a_password_in_an_address_is_refused_and_not_told(tmp_path: Path, scheme: str) -> None:
    assert urls({"DOCKER_CONFIG": "/nonexistent", "DOCKER_HOST": "unix:///a@b.sock"}) == ["unix:///a@b.sock", *USUAL]
    host = f"{scheme}user:s/3cr3t@far:2376/x"
    make_context(tmp_path, "far", host)
    environment = {"DOCKER_CONFIG": str(tmp_path)}
    for named, ambient in (({"socket_path": host}, {}), ({}, {"DOCKER_HOST": host}), ({}, {"DOCKER_CONTEXT": "far"})):
        with pytest.raises(ConfigurationError, match="user or password") as refused:
            urls(environment | ambient, **named)
        assert "3cr3t" not in refused.value.message


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"socket_path": "/a", "docker_context": "b"}, "exclude each other"),
        ({"socket_path": "tcp://h:1", "docker_tls_cert": "/c"}, "belong together"),
        ({"socket_path": "tcp://h:1", "docker_tls_cert": "/c", "docker_tls_key": "/k"}, "docker_tls_ca is needed"),
        ({"socket_path": "/a", "docker_tls_ca": "/c"}, "only with a tcp://"),
    ],
)
def test_combinations_that_mean_nothing_are_refused(values: dict[str, str], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        load_config({"bind_socket": Path("/run/x/d.sock")} | values, environment={})


async def test_field_report_16_every_candidate_is_named_with_why_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = tmp_path / ".docker" / "run" / "docker.sock"
    dead.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(dead))  # a socket file behind which nobody listens
    first = tmp_path / "first.sock"
    environment = {"DOCKER_HOST": f"unix://{first}", "HOME": str(tmp_path), "DOCKER_CONFIG": str(tmp_path)}
    config = load_config({"bind_socket": Path("/run/x/d.sock")}, environment={})
    monkeypatch.setattr("driver_docker.engine_address._FIRST_SOCKET", tmp_path / "usual.sock")
    with pytest.raises(EngineUnreachableError) as refused:
        await find_engine(config, environment)
    for part in (str(first), "No such file", str(dead), "Connection refused", "usual.sock", "DOCKER_HOST"):
        assert part in refused.value.message
    assert "--docker-socket" in refused.value.message


async def test_an_engine_whose_socket_is_not_this_users_is_told_with_that_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "docker.sock"
    place.touch()
    monkeypatch.setattr("driver_docker.engine_address.os.access", lambda *_: False)
    config = load_config({"bind_socket": Path("/run/x/d.sock"), "socket_path": str(place)}, environment={})
    with pytest.raises(EngineUnreachableError, match=rf"join its group \({place.group()}\)"):
        await find_engine(config, {})


async def test_an_engine_that_refuses_is_told_in_a_whole_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        config = load_config({"bind_socket": Path("/run/x/d.sock"), "socket_path": address}, environment={})
        with pytest.raises(EngineUnreachableError) as refused:
            await find_engine(config, {})
    assert "the engine cannot be reached: Connection refused" in refused.value.message


@pytest.mark.parametrize(("oldest", "newest"), [("1.99", "1.100"), ("1.12", "1.24")])
def test_field_report_44_a_refusal_names_both_ranges(oldest: str, newest: str) -> None:
    with pytest.raises(EngineIncompatibleError) as refused:
        engine_info({"ApiVersion": newest, "MinAPIVersion": oldest}, {}, "unix:///e.sock")
    assert f"{oldest} to {newest}" in refused.value.message
    assert "this driver 1." in refused.value.message


@pytest.mark.parametrize(("oldest", "newest", "chosen"), [("1.24", "1.41", "1.41"), ("1.44", "1.60", None)])
def test_field_report_44_the_newest_common_version_is_spoken(oldest: str, newest: str, chosen: str | None) -> None:
    info = engine_info({"ApiVersion": newest, "MinAPIVersion": oldest}, {}, "unix:///e.sock")
    assert info.api >= (1, 41)
    assert chosen is None or info.api_version == chosen
