"""The page about mounts and devices says what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path

from google.protobuf.struct_pb2 import Struct

from driver_docker import upstream_proxy
from driver_docker.config import DriverConfig
from driver_docker.driver_config import decode_driver_config
from driver_docker.mounts import CONTROL_PATHS, BindRequest, TmpfsRequest, VolumeRequest

PAGE = (Path(__file__).parents[3] / "docs" / "mounts-and-devices.md").read_text(encoding="utf-8")


def test_the_example_is_accepted_as_it_stands() -> None:
    (block,) = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
    struct = Struct()
    struct.update(json.loads(block))
    config = decode_driver_config(struct, allow=True)
    assert [type(mount) for mount in config.mounts] == [VolumeRequest, TmpfsRequest, BindRequest]
    assert config.cdi_devices == ("nvidia.com/gpu=0",)


def test_the_listed_control_paths_are_the_refused_ones() -> None:
    (listed,) = re.findall(r"<!-- control paths -->(.*?)<!-- /control paths -->", PAGE, flags=re.DOTALL)
    assert re.findall(r"`([^`]+)`", listed) == list(CONTROL_PATHS)


def test_the_named_keys_flags_and_places_exist() -> None:
    table = PAGE[PAGE.index("## What every supervisor is given") :]
    keys = {
        key for row in re.findall(r"^\| (`[^|]+) \|", table, flags=re.MULTILINE) for key in re.findall(r"`(\w+)`", row)
    }
    assert keys
    assert keys <= set(DriverConfig.model_fields)
    assert upstream_proxy.PROXY_AUTH_PATH in table
    assert upstream_proxy.PROXY_CA_BUNDLE_PATH in table
    assert upstream_proxy.SPIFFE_VARIABLE in table
    config = DriverConfig.model_validate(
        {
            "bind_socket": "/run/d.sock",
            "state_dir": "/var/lib/d",
            "https_proxy": "http://p:1",
            "no_proxy": "x",
            "proxy_auth_file": "/a",
            "proxy_auth_allow_insecure": True,
            "proxy_connect_by_hostname": True,
            "proxy_ca_bundle": "/b",
        }
    )
    for flag in upstream_proxy.proxy_arguments(config):
        if flag.startswith("--"):
            assert f"`{flag}`" in table
