"""What is never quoted of a supervisor's log: every secret that it was given, in the forms that it may show it in."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import pytest
from scripted.compute_gateway import launch_authentication

from driver_docker.log_secrets import of_bundle, of_proxy_credentials
from driver_docker.tail import redact

FIRST, SECOND = "b3BlbnNzaC1rZXktdjEAAAAABG5vbmU", "AAAEbm9uZQAAAAAAAAABAAAAMw"
KEY = f"-----BEGIN OPENSSH PRIVATE KEY-----\n{FIRST}\n{SECOND}\n-----END OPENSSH PRIVATE KEY-----\n"
BUNDLE = replace(launch_authentication().supervisor, ssh_host_private_key=KEY)


@pytest.mark.parametrize(
    "quoted",
    [
        BUNDLE.gateway_token,
        BUNDLE.sandbox_token,
        KEY,
        json.dumps(KEY),
        SECOND,
        f"broken key {FIRST} here",
    ],
)
def test_no_credential_of_a_launch_is_quoted_whole_or_in_lines(quoted: str) -> None:
    told = redact(f"cannot use {quoted}", of_bundle(BUNDLE))
    for secret in (BUNDLE.gateway_token, BUNDLE.sandbox_token, FIRST, SECOND):
        assert secret not in told
    assert told.startswith("cannot use ")


def test_a_bundle_without_a_key_has_its_tokens_alone() -> None:
    bundle = launch_authentication().supervisor
    assert of_bundle(bundle) == (bundle.gateway_token, bundle.sandbox_token)


@pytest.mark.parametrize(
    "quoted",
    [
        "alice:hunt/r2",
        "http://alice:hunt%2Fr2@proxy:3128",
        "password hunt/r2 was refused",
        base64.b64encode(b"alice:hunt/r2").decode(),
    ],
)
def test_the_proxys_credentials_are_quoted_in_no_form(quoted: str) -> None:
    told = redact(f"the proxy refused {quoted}", of_proxy_credentials(b"alice:hunt/r2\n"))
    for form in ("hunt/r2", "hunt%2Fr2", base64.b64encode(b"alice:hunt/r2").decode()):
        assert form not in told


def test_where_there_are_none_nothing_is_secret() -> None:
    assert of_proxy_credentials(None) == ()
    assert of_proxy_credentials(b"\xff\n") != ()
    assert redact("words stay", of_proxy_credentials(b"alice:\n")) == "words stay"
