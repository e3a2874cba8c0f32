"""What a driver would stage for one launch: descriptor, tokens, TLS of the session."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from unit.supervisor.fake_gateway import SANDBOX_ID, SANDBOX_NAME, TOKEN

from openshell.isolation.documents import (
    AuthBundle,
    BoundaryBootstrap,
    IdentitySource,
    ListenerTls,
    MainProcessSpec,
    OuterFence,
    RuntimeDescriptor,
    TransportTls,
    UnixListener,
    UnixTransport,
    VerificationKey,
    WorkloadIdentity,
)
from openshell.isolation.tls import SessionTls, issue_session_tls
from openshell.isolation.tokens import TokenClaims, mint_sandbox_token
from supervisor_reference.endpoint import parse_endpoint
from supervisor_reference.launch import LaunchInputs
from supervisor_reference.selection import BoundaryPlan

if TYPE_CHECKING:
    from pathlib import Path

GATEWAY_ID = "gw-1"
GENERATION = "generation-1"
KEY_ID = "key-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchMaterial:
    """Everything that one launch consists of, before any file is written."""

    session_id: str
    descriptor: RuntimeDescriptor
    bootstrap: BoundaryBootstrap
    auth: AuthBundle
    tls: SessionTls = field(repr=False)
    private_key_pem: str = field(repr=False)

    def sandbox_token(self, *, auth_epoch: int = 1) -> str:
        """A fresh token for the boundary."""
        return _sandbox_token(self.private_key_pem, auth_epoch=auth_epoch)

    def inputs(
        self,
        url: str,
        *,
        command: tuple[str, ...] = ("/bin/agent", "--go"),
        health_socket: Path | None = None,
    ) -> LaunchInputs:
        """What the supervisor reads of it."""
        return LaunchInputs(
            endpoint=parse_endpoint(url, {}),
            sandbox_id=SANDBOX_ID,
            sandbox_name=SANDBOX_NAME,
            plan=BoundaryPlan(
                backend_name="openshell-sandbox",
                descriptor=self.descriptor,
                driver_descriptor=self.descriptor.to_json(),
            ),
            auth=self.auth,
            main_process=MainProcessSpec(command=command),
            workdir="/sandbox",
            health_socket=health_socket,
            log_level="debug",
        )

    def environment(self, url: str, **more: str) -> dict[str, str]:
        """The environment of the supervisor's container."""
        return {
            "OPENSHELL_ADMITTED_ISOLATION_BACKEND": "openshell-sandbox",
            "OPENSHELL_ENDPOINT": url,
            "OPENSHELL_SANDBOX_ID": SANDBOX_ID,
            "OPENSHELL_SANDBOX": SANDBOX_NAME,
            "OPENSHELL_MAIN_PROCESS_SPEC": MainProcessSpec(command=("/bin/agent",)).to_json().decode(),
            **more,
        }

    def stage(self, folder: Path) -> list[str]:
        """Write the supervisor's files; returns the flags that name them."""
        (folder / "runtime-descriptor.json").write_bytes(self.descriptor.to_json())
        (folder / "auth.json").write_bytes(self.auth.to_json())
        return [
            "--backend-descriptor-file",
            str(folder / "runtime-descriptor.json"),
            "--auth-bundle-file",
            str(folder / "auth.json"),
            "--workdir",
            "/sandbox",
            f"--health-socket-path={folder / 'health.sock'}",
        ]


def make_launch(socket_path: str) -> LaunchMaterial:
    """Make the material of a launch whose boundary listens on a socket."""
    session_id = str(uuid.uuid4())
    tls = issue_session_tls(session_id)
    key = Ed25519PrivateKey.generate()
    public_pem = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    private_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    identity = WorkloadIdentity(
        uid=1000, gid=1000, supplementary_gids=(), source=IdentitySource.DEFAULT, resource_digest="sha256:00"
    )
    fence = OuterFence.attest(generation=GENERATION, evidence=b"{}")
    claims = {"docker.container_id": "c1", "docker.image_identity": "sha256:00"}
    now = int(time.time())
    descriptor = RuntimeDescriptor(
        boundary_id=SANDBOX_ID,
        generation=GENERATION,
        session_id=session_id,
        workload_identity=identity,
        transport=UnixTransport(socket_path=socket_path),
        tls=TransportTls(server_name=tls.server_name, trust_anchor_pem=tls.trust_anchor_pem),
        resource_claims=claims,
        outer_fence=fence,
    )
    bootstrap = BoundaryBootstrap(
        boundary_id=SANDBOX_ID,
        generation=GENERATION,
        session_id=session_id,
        session_rotation=1,
        auth_epoch=1,
        gateway_id=GATEWAY_ID,
        verification_keys=(VerificationKey(key_id=KEY_ID, public_key_pem=public_pem.decode()),),
        listener=UnixListener(
            socket_path=socket_path,
            tls=ListenerTls(certificate_chain_path="/server.crt", private_key_path="/server.key"),
        ),
        resource_claims=claims,
        workload_identity=identity,
        outer_fence=fence,
    )
    auth = AuthBundle(
        session_id=session_id,
        runtime_generation=GENERATION,
        session_rotation=1,
        auth_epoch=1,
        gateway_token=TOKEN,
        gateway_expires_at=now + 3600,
        sandbox_token=_sandbox_token(private_pem.decode(), auth_epoch=1),
        sandbox_expires_at=now + 3600,
    )
    return LaunchMaterial(
        session_id=session_id,
        descriptor=descriptor,
        bootstrap=bootstrap,
        auth=auth,
        tls=tls,
        private_key_pem=private_pem.decode(),
    )


def _sandbox_token(private_key_pem: str, *, auth_epoch: int) -> str:
    now = int(time.time())
    claims = TokenClaims(
        gateway_id=GATEWAY_ID,
        sandbox_id=SANDBOX_ID,
        runtime_generation=GENERATION,
        auth_epoch=auth_epoch,
        token_id=str(uuid.uuid4()),
        issued_at=now,
        expires_at=now + 3600,
    )
    return mint_sandbox_token(claims, key_id=KEY_ID, private_key_pem=private_key_pem)
