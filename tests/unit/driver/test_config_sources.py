"""Where configuration comes from, beyond the order of precedence: shared variables, tables, names that are not keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from driver_docker.cli_options import flag_of
from driver_docker.config import DriverConfig
from driver_docker.config_sources import CONFIG_VARIABLE, TABLES, load_config, variables_of
from driver_docker.errors import ConfigurationError

SOCKET = {"OPENSHELL_DOCKER_DRIVER_BIND_SOCKET": "/run/own/d.sock"}
SHARED = {"OPENSHELL_COMPUTE_DRIVER_SOCKET": "/run/gateway/d.sock"}


def load(environment: dict[str, str], **values: Any) -> DriverConfig:
    return load_config(values, environment=environment)


def test_the_drivers_own_variable_goes_before_the_one_that_a_gateway_reads_too() -> None:
    assert load(SHARED).bind_socket == Path("/run/gateway/d.sock")
    assert load(SHARED | SOCKET).bind_socket == Path("/run/own/d.sock")
    assert load(SHARED | SOCKET, bind_socket=Path("/run/flag/d.sock")).bind_socket == Path("/run/flag/d.sock")
    assert variables_of("bind_socket") == ("OPENSHELL_DOCKER_DRIVER_BIND_SOCKET", "OPENSHELL_COMPUTE_DRIVER_SOCKET")


def test_levels_may_be_written_large() -> None:
    assert load(SOCKET | {"OPENSHELL_LOG_LEVEL": "WARNING"}).log_level.value == "warn"
    own = {"OPENSHELL_DOCKER_DRIVER_LOG_LEVEL": "Error", "OPENSHELL_LOG_LEVEL": "debug"}
    assert load(SOCKET | own).log_level.value == "error"


def test_a_table_is_json_in_the_environment() -> None:
    table = '{"enabled": false, "required_labels": {"team": "a"}}'
    config = load(SOCKET | {"OPENSHELL_DOCKER_DRIVER_RESOURCE_ADMISSION": table})
    assert (config.resource_admission.enabled, config.resource_admission.required_labels) == (False, {"team": "a"})
    with pytest.raises(ConfigurationError, match="resource_admission") as refused:
        load(SOCKET | {"OPENSHELL_DOCKER_DRIVER_RESOURCE_ADMISSION": '{"secret": s3cr3t}'})
    assert "s3cr3t" not in refused.value.message


def test_a_table_may_be_a_list_in_the_environment() -> None:
    table = '[{"name": "acme", "kind": "unix", "socket_path": "/run/acme/b.sock"}]'
    assert set(load(SOCKET | {"OPENSHELL_DOCKER_DRIVER_ISOLATION_BACKENDS": table}).isolation_backends) == {"acme"}
    with pytest.raises(ConfigurationError, match="isolation_backends: the environment holds a table that is not JSON"):
        load(SOCKET | {"OPENSHELL_DOCKER_DRIVER_ISOLATION_BACKENDS": "[" * 100_000})


def test_only_a_table_is_json_in_the_environment() -> None:
    assert {key for key in DriverConfig.model_fields if flag_of(key) is None} == TABLES
    made = load(
        SOCKET
        | {
            "OPENSHELL_DOCKER_DRIVER_HTTPS_PROXY": "http://proxy:1",
            "OPENSHELL_DOCKER_DRIVER_NO_PROXY": "[2001:db8::1],localhost",
        }
    )
    assert made.no_proxy == "[2001:db8::1],localhost"


def test_an_empty_variable_is_none() -> None:
    assert load(SOCKET | {"OPENSHELL_DOCKER_DRIVER_SANDBOX_LABEL": ""}).sandbox_label == "default"


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("OPENSHELL_DOCKER_DRIVER_SANDBOX_LABLE", "OPENSHELL_DOCKER_DRIVER_SANDBOX_LABEL"),
        ("OPENSHELL_DOCKER_DRIVER_DEFAULT_IMAGES", "OPENSHELL_DOCKER_DRIVER_DEFAULT_IMAGE"),
    ],
)
def test_an_unknown_variable_is_refused_with_a_suggestion(name: str, suggestion: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load(SOCKET | {name: "s3cr3t"})
    assert f"unknown environment variable {name}; did you mean {suggestion}?" in refused.value.message
    assert "s3cr3t" not in refused.value.message


def test_variables_of_others_are_none_of_ours() -> None:
    load(SOCKET | {"OPENSHELL_DRIVERS": "docker", "OPENSHELL_COMPUTE_DRIVER": "docker", CONFIG_VARIABLE: "/etc/x.toml"})


def test_defaults_of_a_caller_lose_to_every_source(tmp_path: Path) -> None:
    file = tmp_path / "driver.toml"
    file.write_text('bind_socket = "/run/file/d.sock"\n')
    unset = {"bind_socket": Path("/run/unset")}
    assert load_config({}, environment={}, defaults=unset).bind_socket == Path("/run/unset")
    assert load_config({}, file=file, environment={}, defaults=unset).bind_socket == Path("/run/file/d.sock")


@pytest.mark.parametrize("port", [-1, 65536, "8080 x", "\uff18\uff10", ""])
def test_field_report_65_a_metrics_port_is_a_port(port: Any) -> None:
    with pytest.raises(ConfigurationError, match="metrics_port"):
        load(SOCKET, metrics_port=port)
