"""The operator's proxy, SPIFFE socket and files: checked at start, and told to each supervisor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from driver_docker.config import DriverConfig
from driver_docker.config_sources import load_config
from driver_docker.errors import ConfigurationError
from driver_docker.http_address import AddressCredentialsError, check_http_address
from driver_docker.supervisor_files import SupervisorFileError, SupervisorFiles, read_supervisor_files
from driver_docker.upstream_proxy import proxy_arguments, spiffe_binds, spiffe_environment
from openshell.status import StatusCode

PEM = b"-----BEGIN CERTIFICATE-----\nMAo=\n-----END CERTIFICATE-----\n"


def config(**values: Any) -> DriverConfig:
    return load_config({"bind_socket": Path("/run/d.sock")} | values, environment={})


def test_no_proxy_no_flags() -> None:
    assert proxy_arguments(config()) == ()
    assert (spiffe_binds(config()), spiffe_environment(config())) == ((), {})


def test_every_key_becomes_its_flag_and_no_secret_is_among_them() -> None:
    made = config(
        https_proxy="http://proxy.corp:3128",
        no_proxy="localhost,10.0.0.0/8",
        proxy_auth_file="/etc/acme/proxy-auth",
        proxy_auth_allow_insecure=True,
        proxy_connect_by_hostname=True,
        proxy_ca_bundle="/etc/acme/ca.pem",
    )
    assert proxy_arguments(made) == (
        "--upstream-proxy",
        "http://proxy.corp:3128",
        "--upstream-no-proxy",
        "localhost,10.0.0.0/8",
        "--upstream-proxy-auth-file",
        "/.openshell/supervisor/upstream-proxy-auth",
        "--upstream-proxy-auth-allow-insecure",
        "--upstream-proxy-connect-by-hostname",
        "--upstream-proxy-ca-bundle",
        "/.openshell/supervisor/upstream-proxy-ca-bundle.pem",
    )


def test_a_proxy_alone_is_one_flag() -> None:
    assert proxy_arguments(config(https_proxy="https://[2001:db8::1]:3128")) == (
        "--upstream-proxy",
        "https://[2001:db8::1]:3128",
    )


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"proxy_ca_bundle": "/ca.pem"}, "proxy_ca_bundle needs https_proxy"),
        ({"proxy_auth_file": "/auth"}, "proxy_auth_file needs https_proxy"),
        ({"no_proxy": "x"}, "no_proxy needs https_proxy"),
        ({"proxy_connect_by_hostname": True}, "proxy_connect_by_hostname needs https_proxy"),
        ({"https_proxy": "proxy:3128"}, "https_proxy must be http"),
        ({"https_proxy": "socks5://proxy:1"}, "https_proxy must be http"),
        ({"https_proxy": "http://"}, "https_proxy must be http"),
        ({"https_proxy": "http://proxy:0"}, "https_proxy must name a port other than 0"),
        ({"https_proxy": "http://[hunter2"}, "https_proxy must be http"),
        ({"https_proxy": "http://proxy:x"}, "https_proxy names a port"),
        ({"https_proxy": "http://proxy:1#hunter2"}, "https_proxy must be http"),
        ({"https_proxy": "http://proxy:99999"}, "port beyond"),
        ({"https_proxy": "http://proxy:1/path"}, "https_proxy must be http"),
        ({"https_proxy": "http://pro xy:1"}, "https_proxy must be http"),
        ({"https_proxy": "http://user:hunter2@proxy:1"}, "https_proxy must not hold credentials; put them into"),
        ({"https_proxy": "http://proxy:1", "proxy_auth_file": "/auth"}, "proxy_auth_allow_insecure"),
        ({"https_proxy": "http://proxy:1", "no_proxy": " "}, "no_proxy must be"),
        ({"provider_spiffe_workload_api_socket": "run/spire.sock"}, "absolute"),
        ({"provider_spiffe_workload_api_socket": "/run/spire/../x.sock"}, "absolute"),
        ({"provider_spiffe_workload_api_socket": "/run/agent.sock"}, "folder of its own"),
        ({"provider_spiffe_workload_api_socket": "/agent.sock"}, "folder of its own"),
        ({"provider_spiffe_workload_api_socket": "/run/openshell/x/agent.sock"}, "folder of its own"),
        ({"provider_spiffe_workload_api_socket": "/run/a:b/agent.sock"}, "must not hold"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_by_its_key(values: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        config(**values)
    assert word in refused.value.message
    assert "hunter2" not in refused.value.message


def test_credentials_may_go_to_an_encrypted_proxy() -> None:
    config(https_proxy="https://proxy:3129", proxy_auth_file="/auth")


def test_the_spiffe_sockets_folder_is_shown_read_only() -> None:
    made = config(provider_spiffe_workload_api_socket="/run/spire/sockets/agent.sock")
    assert spiffe_binds(made) == ("/run/spire/sockets:/run/spire/sockets:ro",)
    assert spiffe_environment(made) == {
        "OPENSHELL_PROVIDER_SPIFFE_WORKLOAD_API_SOCKET": "/run/spire/sockets/agent.sock"
    }


def test_the_operators_files_are_read_anew_each_time(tmp_path: Path) -> None:
    auth, bundle, ca = tmp_path / "auth", tmp_path / "bundle.pem", tmp_path / "ca.pem"
    auth.write_bytes(b"user:s3cr3t\n")
    bundle.write_bytes(PEM + PEM)
    ca.write_bytes(PEM)
    made = config(
        https_proxy="https://proxy:1",
        proxy_auth_file=auth,
        proxy_ca_bundle=bundle,
        guest_tls_ca=ca,
        grpc_endpoint="https://127.0.0.1:1",
    )
    files = read_supervisor_files(made)
    assert files == SupervisorFiles(gateway_ca=PEM, proxy_auth=b"user:s3cr3t\n", proxy_ca_bundle=PEM + PEM)
    assert "s3cr3t" not in repr(files)
    auth.write_bytes(b"rotated")
    assert read_supervisor_files(made).proxy_auth == b"rotated"
    assert read_supervisor_files(config()) == SupervisorFiles()


@pytest.mark.parametrize(
    ("key", "content", "word"),
    [
        ("proxy_auth_file", None, "cannot be read"),
        ("proxy_auth_file", b"", "is empty"),
        ("proxy_auth_file", b" \n", "is empty"),
        ("proxy_auth_file", b"x" * 16385, "larger than"),
        ("proxy_ca_bundle", b"no certificate, s3cr3t", "holds no PEM certificate"),
        ("proxy_ca_bundle", b"x" * (1024 * 1024 + 1), "larger than"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_never_quoted(
    tmp_path: Path, key: str, content: bytes | None, word: str
) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SupervisorFileError) as refused:
        read_supervisor_files(config(https_proxy="https://proxy:1", **{key: file}))
    assert key in refused.value.message
    assert word in refused.value.message
    assert "s3cr3t" not in refused.value.message
    assert refused.value.status is StatusCode.FAILED_PRECONDITION


def test_a_folder_that_cannot_be_looked_at_is_one_that_is_not_there() -> None:
    with pytest.raises(SupervisorFileError, match="does not exist, or the driver cannot see it"):
        read_supervisor_files(config(provider_spiffe_workload_api_socket=f"/{'a' * 300}/agent.sock"))


def test_a_folder_for_supervisors_must_be_there_where_the_engines_files_are_ours(tmp_path: Path) -> None:
    socket = tmp_path / "spire" / "agent.sock"
    with pytest.raises(SupervisorFileError, match="spire, which the configuration names"):
        read_supervisor_files(config(provider_spiffe_workload_api_socket=str(socket)))
    read_supervisor_files(config(provider_spiffe_workload_api_socket=str(socket), socket_path="tcp://10.0.0.1:2375"))
    socket.parent.mkdir()
    read_supervisor_files(config(provider_spiffe_workload_api_socket=str(socket)))


def test_only_an_address_with_credentials_gets_the_advice_for_them() -> None:
    with pytest.raises(AddressCredentialsError):
        check_http_address("http://user:hunter2@proxy:1")
    with pytest.raises(ValueError, match="port") as failed:
        check_http_address("http://credentials:99999")
    assert not isinstance(failed.value, AddressCredentialsError)
