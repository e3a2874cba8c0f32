"""Configuration: three sources, strict keys, rules of compute-driver contract 7.3."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from driver_docker.config import DriverConfig, PullPolicy
from driver_docker.config_sources import default_state_dir, load_config
from driver_docker.errors import ConfigurationError

BASE = {"bind_socket": Path("/run/x/d.sock")}


def load(**values: Any) -> DriverConfig:
    return load_config(BASE | values, environment={})


def test_defaults_are_those_of_the_contract() -> None:
    config = load()
    assert config.sandbox_label == "default"
    assert config.image_pull_policy is PullPolicy.IF_NOT_PRESENT
    assert config.sandbox_pids_limit == 2048
    assert config.ssh_socket_path == "/run/openshell/ssh.sock"
    assert (config.allow_driver_config, config.resource_admission.enabled) == (False, True)
    assert config.gateway_manages_lifecycle is True
    assert (config.stop_grace_seconds, config.supervisor_stop_grace_seconds) == (10, 5)


def test_flags_win_over_environment_and_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "driver.toml"
    file.write_text('sandbox_label = "from-file"\ndefault_image = "file:1"\nsandbox_pids_limit = 7\n')
    environment = {
        "OPENSHELL_DOCKER_DRIVER_SANDBOX_LABEL": "from-env",
        "OPENSHELL_DOCKER_DRIVER_DEFAULT_IMAGE": "env:1",
        "OPENSHELL_COMPUTE_DRIVER_SOCKET": "/run/env/d.sock",
        "OPENSHELL_LOG_LEVEL": "DEBUG",
    }
    config = load_config({"default_image": "flag:1", "sandbox_label": None}, file=file, environment=environment)
    assert (config.default_image, config.sandbox_label, config.sandbox_pids_limit) == ("flag:1", "from-env", 7)
    assert str(config.bind_socket) == "/run/env/d.sock"
    assert config.log_level.value == "debug"


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"sandbox_lable": "x"}, "did you mean sandbox_label"),
        ({"resource_admission": {"enable": False}}, "did you mean resource_admission.enabled"),
        ({"bind_socket": None}, "bind_socket must be set"),
        ({"sandbox_pids_limit": 0}, "sandbox_pids_limit"),
        ({"sandbox_pids_limit": -1}, "sandbox_pids_limit"),
        ({"image_pull_policy": "newer"}, "image_pull_policy"),
        ({"supervisor_image": "Host/X:1"}, "supervisor_image: must be an image reference: the name must be lower-case"),
        ({"sandbox_label": "a/b"}, "sandbox_label"),
        ({"sandbox_label": ""}, "sandbox_label"),
        ({"grpc_endpoint": "127.0.0.1:1"}, "grpc_endpoint"),
        ({"grpc_endpoint": "http://127.0.0.1:0"}, "port"),
        ({"grpc_endpoint": "https://127.0.0.1:1"}, "guest_tls_ca is needed"),
        ({"guest_tls_ca": "/ca.pem", "grpc_endpoint": "http://127.0.0.1:1"}, "guest_tls_ca is refused"),
        ({"grpc_endpoint": "http://127.0.0.1"}, "grpc_endpoint: must name a port"),
        ({"grpc_endpoint": "http://user:hunter2@127.0.0.1:1"}, "grpc_endpoint: must not hold credentials"),
        ({"grpc_endpoint": "http://127.0.0.1:1/x"}, "grpc_endpoint: must be http"),
        ({"grpc_endpoint": "http://127.0.0.1:1?token=hunter2"}, "grpc_endpoint: must be http"),
        ({"grpc_endpoint": "http://127.0.0.1:1?"}, "grpc_endpoint: must be http"),
        ({"grpc_endpoint": "http://127.0.0.1:1#hunter2"}, "grpc_endpoint: must be http"),
        ({"grpc_endpoint": "http://ho st:1"}, "grpc_endpoint: must be http"),
        ({"grpc_endpoint": "http://127.0.0.1:1\n"}, "grpc_endpoint: must be http"),
        ({"grpc_endpoint": "http://host\\evil:1"}, "grpc_endpoint: must be http"),
        ({"grpc_endpoint": "http://[hunter2:1"}, "grpc_endpoint: must be http"),
        ({"grpc_endpoint": "http://127.0.0.1:70000"}, "grpc_endpoint: names a port"),
        ({"grpc_endpoint": "http://127.0.0.1:x"}, "grpc_endpoint: names a port"),
        ({"state_dir": "state"}, "state_dir: must be an absolute path"),
        ({"state_dir": "~/state"}, "state_dir: must be an absolute path"),
        ({"state_dir": ""}, "state_dir: must be an absolute path"),
        ({"ssh_socket_path": ""}, "ssh_socket_path: must be an absolute"),
        ({"ssh_socket_path": "run/ssh.sock"}, "ssh_socket_path: must be an absolute"),
        ({"ssh_socket_path": "/run/../ssh.sock"}, "ssh_socket_path: must be an absolute"),
        ({"ssh_socket_path": "//run/ssh.sock"}, "ssh_socket_path: must be an absolute"),
        ({"ssh_socket_path": "/run/a\nb"}, "ssh_socket_path: must be an absolute"),
        ({"log_level": "loud"}, "log_level"),
        ({"guest_tls_key": "/key.pem"}, "guest_tls_key is not supported"),
        ({"staging": "downstream"}, "staging"),
        ({"app_armor_profile": "nonsense"}, "app_armor_profile"),
        ({"resource_admission": {"required_labels": {"openshell.ai/managed-by": "x"}}}, "reserved"),
        ({"resource_admission": {"required_labels": {"a": "${workspace}"}}}, "fixed value"),
        ({"resource_admission": {"required_labels": {"a": "x-${workspace}", "b": "c"}}}, "must stand alone"),
        ({"resource_admission": {"required_labels": {"-a": "x"}}}, "no label key"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], word: str) -> None:
    merged = {key: value for key, value in (BASE | values).items() if value is not None}
    with pytest.raises(ConfigurationError) as refused:
        load_config(merged, environment={})
    assert word in refused.value.message
    assert "hunter2" not in refused.value.message


def test_a_gateway_whose_ca_is_known_is_reached_encrypted() -> None:
    assert load().grpc_endpoint == "http://127.0.0.1:17670"
    secure = load(guest_tls_ca="/ca.pem")
    assert (secure.grpc_endpoint, secure.host_gateway_ip) == ("https://127.0.0.1:17670", "127.0.0.1")
    assert load(guest_tls_ca="/ca.pem", grpc_endpoint="https://gw:1").grpc_endpoint == "https://gw:1"


@pytest.mark.parametrize(
    ("word", "told", "own"),
    [
        ("trace", "trace", logging.DEBUG),
        ("debug", "debug", logging.DEBUG),
        ("info", "info", logging.INFO),
        ("warn", "warn", logging.WARNING),
        ("warning", "warn", logging.WARNING),
        ("error", "error", logging.ERROR),
    ],
)
def test_levels_are_the_words_that_gateways_and_components_share(word: str, told: str, own: int) -> None:
    level = load_config(BASE, environment={"OPENSHELL_LOG_LEVEL": word}).log_level
    assert (level.value, level.own) == (told, own)
    assert load(log_level=word).log_level is level


def test_a_secret_in_a_wrong_key_is_not_repeated(tmp_path: Path) -> None:
    file = tmp_path / "driver.toml"
    file.write_text('proxy_token = "s3cr3t-value"\n')
    with pytest.raises(ConfigurationError) as refused:
        load_config(BASE, file=file, environment={})
    assert "proxy_token" in refused.value.message
    assert "s3cr3t" not in refused.value.message


@pytest.mark.parametrize("content", ["= nonsense", None])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "driver.toml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigurationError) as refused:
        load_config(BASE, file=file, environment={})
    assert str(file) in refused.value.message


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("http://127.0.0.1:1", "127.0.0.1"),
        ("http://localhost:1", "127.0.0.1"),
        ("http://10.1.2.3:1", "10.1.2.3"),
        ("http://gateway.example:1", None),
        ("http://[::1]:1", None),
    ],
)
def test_the_gateways_address_is_known_only_for_ipv4(endpoint: str, expected: str | None) -> None:
    assert load(grpc_endpoint=endpoint).host_gateway_ip == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"XDG_STATE_HOME": "/s", "HOME": "/h"}, "/s/openshell/docker-sandbox-tokens"),
        ({"XDG_STATE_HOME": "s", "HOME": "/h"}, "/h/.local/state/openshell/docker-sandbox-tokens"),
        ({"HOME": "/h"}, "/h/.local/state/openshell/docker-sandbox-tokens"),
    ],
)
def test_records_are_kept_where_the_contract_says(environment: dict[str, str], expected: str) -> None:
    assert str(default_state_dir(environment)) == expected
