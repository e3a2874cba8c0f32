"""What the peers of a boundary import: start-up time is theirs, on every launch."""

from __future__ import annotations

import subprocess
import sys

import pytest


def loaded(statements: str) -> set[str]:
    code = f"{statements}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["client", "server", "tls", "tokens"])
def test_neither_peer_imports_cryptography_before_it_is_needed(module: str) -> None:
    assert not {"cryptography", "jwt"} & loaded(f"import openshell.isolation.{module}")


def test_a_verifier_has_imported_all_it_needs_when_the_first_peer_comes() -> None:
    statements = (
        "from openshell.isolation.tokens import TokenProfile, TokenVerifier\n"
        "TokenVerifier(profile=TokenProfile.SANDBOX, gateway_id='g', keys=())\n"
    )
    assert "jwt" in loaded(statements)
