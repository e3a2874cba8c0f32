from __future__ import annotations

import json
from pathlib import Path

import pytest

from openshell._discovery import find_gateway
from openshell.errors import GatewayConfigurationError


def configure(root: Path, name: str, **metadata: object) -> None:
    folder = root / "gateways" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metadata.json").write_text(json.dumps(metadata), "utf-8")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {
        "HOME": str(tmp_path / "home"),
        "XDG_CONFIG_HOME": str(tmp_path / "user"),
        "OPENSHELL_SYSTEM_GATEWAY_DIR": str(tmp_path / "system"),
    }


def test_user_entry_shadows_the_system_entry(tmp_path: Path, environment: dict[str, str]) -> None:
    configure(tmp_path / "system", "main", gateway_endpoint="http://127.0.0.1:1")
    (tmp_path / "system" / "active_gateway").write_text("main\n")
    assert find_gateway(environment=environment).endpoint.port == 1
    configure(tmp_path / "user" / "openshell", "main", gateway_endpoint="http://127.0.0.1:2", auth_mode="plaintext")
    assert find_gateway(environment=environment).endpoint.port == 2


def test_endpoint_beats_name_and_argument_beats_environment(tmp_path: Path, environment: dict[str, str]) -> None:
    configure(tmp_path / "user" / "openshell", "a", gateway_endpoint="http://127.0.0.1:1")
    configure(tmp_path / "user" / "openshell", "b", gateway_endpoint="http://127.0.0.1:2")
    environment |= {"OPENSHELL_GATEWAY": "a"}
    assert find_gateway(environment=environment).endpoint.port == 1
    assert find_gateway(name="b", environment=environment).endpoint.port == 2
    environment |= {"OPENSHELL_GATEWAY_ENDPOINT": "http://127.0.0.1:3"}
    assert find_gateway(environment=environment).endpoint.port == 3
    assert find_gateway(name="b", environment=environment).endpoint.port == 2
    assert find_gateway(endpoint="http://127.0.0.1:4", environment=environment).endpoint.port == 4


def test_client_files_are_used_for_https_only(tmp_path: Path, environment: dict[str, str]) -> None:
    root = tmp_path / "user" / "openshell"
    configure(root, "tls", gateway_endpoint="https://gateway.example", auth_mode="mtls")
    (root / "gateways" / "tls" / "mtls").mkdir()
    (root / "gateways" / "tls" / "mtls" / "ca.crt").write_text("x")
    found = find_gateway(name="tls", environment=environment)
    assert found.tls is not None
    assert found.tls.ca_path == root / "gateways" / "tls" / "mtls" / "ca.crt"
    assert found.tls.cert_path is None
    configure(root, "tls", gateway_endpoint="http://127.0.0.1:1", auth_mode="mtls")
    assert find_gateway(name="tls", environment=environment).tls is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "no gateway_endpoint"),
        (b"{}", "no gateway_endpoint"),
        (b'{"gateway_endpoint": 5}', "no gateway_endpoint"),
        (b'{"gateway_endpoint": "x"}', "http://"),
        (b'{"gateway_endpoint": "https://x", "auth_mode": "oidc"}', "needs a login"),
        (b'{"gateway_endpoint": "https://x", "auth_mode": ["mtls"]}', "needs a login"),
        (b"\xff\xfe", "not UTF-8"),
        (b" " * 70_000, "larger than"),
    ],
)
def test_unusable_metadata_is_one_error_that_names_the_file(
    tmp_path: Path, environment: dict[str, str], content: bytes, problem: str
) -> None:
    folder = tmp_path / "user" / "openshell" / "gateways" / "g"
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_bytes(content)
    with pytest.raises(GatewayConfigurationError, match=problem) as caught:
        find_gateway(name="g", environment=environment)
    assert str(folder / "metadata.json") in str(caught.value)


def test_nothing_configured_says_what_to_do(environment: dict[str, str]) -> None:
    with pytest.raises(GatewayConfigurationError, match="OPENSHELL_GATEWAY_ENDPOINT"):
        find_gateway(environment=environment)


@pytest.mark.parametrize("name", ["../x", "a/b", ".", "", "x\n"])
def test_a_name_that_is_a_path_is_refused(environment: dict[str, str], name: str) -> None:
    with pytest.raises(GatewayConfigurationError):
        find_gateway(name=name, environment=environment)
