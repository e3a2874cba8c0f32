from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from openshell.isolation.documents import (
    BoundaryBootstrap,
    ListenerTls,
    OuterFence,
    TcpListener,
    UnixListener,
    VerificationKey,
    WorkloadIdentity,
)
from sandbox_runtime.bootstrap import consume
from sandbox_runtime.errors import BootstrapError

if TYPE_CHECKING:
    from pathlib import Path

    from openshell.isolation.documents import Listener

SECRET = "hunter2-in-the-environment"


def write(folder: Path, listener: Listener | None = None) -> Path:
    tls = ListenerTls(certificate_chain_path=str(folder / "server.crt"), private_key_path=str(folder / "server.key"))
    bootstrap = BoundaryBootstrap(
        boundary_id="sandbox-1",
        generation="generation-1",
        session_id="11111111-1111-4111-8111-111111111111",
        session_rotation=1,
        auth_epoch=1,
        gateway_id="gateway-1",
        verification_keys=(VerificationKey(key_id="k", public_key_pem="PEM"),),
        listener=listener or UnixListener(socket_path=str(folder / "control.sock"), tls=tls),
        resource_claims={"docker.container_id": "c"},
        workload_identity=WorkloadIdentity(uid=1000, gid=1000, resource_digest="sha256:0"),
        outer_fence=OuterFence.attest(generation="generation-1", evidence=b"{}"),
        child_env={"TOKEN": SECRET},
    )
    (folder / "server.crt").write_text("chain")
    (folder / "server.key").write_text("key")
    path = folder / "bootstrap.json"
    path.write_bytes(bootstrap.to_json())
    return path


def test_everything_is_read_and_nothing_is_left(tmp_path: Path) -> None:
    provisioned = consume(write(tmp_path))
    assert provisioned.bootstrap.boundary_id == "sandbox-1"
    assert provisioned.socket_path == tmp_path / "control.sock"
    assert (provisioned.certificate_chain_pem, provisioned.private_key_pem) == ("chain", "key")
    assert list(tmp_path.iterdir()) == []
    assert SECRET not in repr(provisioned)


def _unknown_member(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "surprise": SECRET}))


def _claims_in_files(path: Path) -> None:
    claims = {"resource_claim_files": {"docker.container_id": f"/run/{SECRET}"}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **claims}))


def _torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _link(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def _huge(path: Path) -> None:
    path.write_bytes(b" " * (4 * 1024 * 1024 + 1))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.unlink(), "no such file"),
        (_unknown_member, "surprise"),
        (_claims_in_files, "resource_claim_files: this runtime reads no claims from files"),
        (_torn, "not valid"),
        (_pipe, "not a regular file"),
        (_link, "cannot be read"),
        (_huge, "larger than"),
        (lambda path: path.with_name("server.key").unlink(), "private key"),
        (lambda path: path.with_name("server.crt").write_bytes(b"\xff"), "PEM"),
    ],
)
def test_what_is_unusable_is_named_and_no_value_is_quoted(tmp_path: Path, spoil: object, words: str) -> None:
    path = write(tmp_path)
    assert callable(spoil)
    spoil(path)
    with pytest.raises(BootstrapError, match=words) as caught:
        consume(path)
    assert SECRET not in str(caught.value)


def test_a_document_that_turns_out_unusable_is_deleted_too(tmp_path: Path) -> None:
    path = write(tmp_path)
    _unknown_member(path)
    with pytest.raises(BootstrapError):
        consume(path)
    assert not path.exists()


def test_other_listeners_are_refused(tmp_path: Path) -> None:
    tls = ListenerTls(certificate_chain_path="/a", private_key_path="/b")
    path = write(tmp_path, TcpListener(address="127.0.0.1:1", tls=tls))
    with pytest.raises(BootstrapError, match="unix"):
        consume(path)
