"""A toy boundary on the real server, over a real TLS socket."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from openshell.isolation.client import BackendClient
from openshell.isolation.documents import (
    BoundaryBootstrap,
    IdentitySource,
    ListenerTls,
    OuterFence,
    RuntimeDescriptor,
    TransportTls,
    UnixListener,
    UnixTransport,
    VerificationKey,
    WorkloadIdentity,
)
from openshell.isolation.errors import BackendError, ProcessError
from openshell.isolation.operations import (
    Attach,
    Confirmation,
    EnforcedProperty,
    ExitStatus,
    ImagePolicy,
    Policy,
    Properties,
    SessionSnapshot,
    Signal,
    StartAgent,
    Started,
)
from openshell.isolation.server import Backend, BoundaryServer
from openshell.isolation.tls import SessionTls
from openshell.isolation.tokens import TokenClaims, mint_sandbox_token

SESSION = "5f0c7f5e-0000-4000-8000-000000000001"
GENERATION = "generation-1"
SANDBOX = "sandbox-1"
GATEWAY = "gateway-1"
POLICY = Policy(read_only=("/usr",), read_write=("/sandbox",))


@dataclass
class Keys:
    private_pem: str
    verification: VerificationKey

    @classmethod
    def generate(cls, key_id: str = "key-1") -> Keys:
        key = Ed25519PrivateKey.generate()
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        return cls(private.decode(), VerificationKey(key_id=key_id, public_key_pem=public.decode()))


def claims(**changes: object) -> TokenClaims:
    now = int(time.time())
    values = TokenClaims(
        gateway_id=GATEWAY,
        sandbox_id=SANDBOX,
        runtime_generation=GENERATION,
        auth_epoch=1,
        token_id=str(uuid.uuid4()),
        issued_at=now,
        expires_at=now + 600,
    )
    return replace(values, **changes)  # type: ignore[arg-type]


@dataclass
class ToyBackend(Backend):
    """Remembers what was asked of it; its one process ends when it is signaled."""

    bootstrap: BoundaryBootstrap
    calls: list[str] = field(default_factory=list)
    called: asyncio.Condition = field(default_factory=asyncio.Condition)
    ended: asyncio.Future[ExitStatus] | None = None
    fail: dict[str, BackendError] = field(default_factory=dict)
    started_with: StartAgent | None = None

    async def note(self, call: str) -> None:
        async with self.called:
            self.calls.append(call)
            self.called.notify_all()
        if call in self.fail:
            raise self.fail[call]

    async def until(self, call: str, times: int = 1) -> None:
        async with asyncio.timeout(10), self.called:
            await self.called.wait_for(lambda: self.calls.count(call) >= times)

    async def discover_policy(self) -> ImagePolicy:
        await self.note("discover_policy")
        return ImagePolicy(yaml="version: 1\n")

    async def attach(self, request: Attach) -> SessionSnapshot:
        await self.note("attach")
        return SessionSnapshot(generation=self.bootstrap.generation)

    async def snapshot(self) -> SessionSnapshot:
        await self.note("snapshot")
        return SessionSnapshot(generation=self.bootstrap.generation)

    async def confirm(self) -> Confirmation:
        await self.note("confirm")
        prop = EnforcedProperty(mechanism="toy")
        return Confirmation(
            generation=self.bootstrap.generation,
            identity=self.bootstrap.workload_identity,
            properties=Properties(
                filesystem_confinement=prop,
                egress_interception=prop,
                request_attribution=prop,
                privilege_floor=prop,
            ),
            session_id=self.bootstrap.session_id,
            outer_fence=self.bootstrap.outer_fence,
            resource_claims=self.bootstrap.resource_claims,
            backend_audit={"toy": True},
        )

    async def start_agent(self, request: StartAgent) -> Started:
        await self.note("start_agent")
        self.started_with = request
        self.ended = asyncio.get_running_loop().create_future()
        return Started(process_id=f"{self.bootstrap.generation}:main")

    async def wait(self, process_id: str) -> ExitStatus:
        await self.note("wait")
        if self.ended is None or process_id != f"{self.bootstrap.generation}:main":
            raise ProcessError("no such process")
        return await asyncio.shield(self.ended)

    async def signal(self, process_id: str, signal: Signal) -> None:
        await self.note(f"signal {signal}")
        if self.ended is not None and not self.ended.done():
            self.ended.set_result(ExitStatus.signaled(15))

    async def terminate(self, process_id: str) -> None:
        await self.note("terminate")
        await self.signal(process_id, Signal.KILL)

    async def terminate_boundary(self) -> None:
        await self.note("terminate_boundary")
        await self.signal("", Signal.KILL)

    async def freeze(self) -> None:
        await self.note("freeze")

    async def resume(self) -> None:
        await self.note("resume")


@dataclass
class Boundary:
    """A served boundary and everything a supervisor or an attacker needs."""

    backend: ToyBackend
    server: BoundaryServer
    descriptor: RuntimeDescriptor
    session_tls: SessionTls
    keys: Keys
    socket_path: Path
    clients: list[BackendClient] = field(default_factory=list)

    def token(self, **changes: object) -> str:
        return mint_sandbox_token(claims(**changes), key_id="key-1", private_key_pem=self.keys.private_pem)

    async def connect(
        self,
        *,
        token: str | None = None,
        instance: str = "instance-1",
        descriptor: RuntimeDescriptor | None = None,
        backend_name: str = "openshell-sandbox",
    ) -> BackendClient:
        used = descriptor or self.descriptor
        client = await BackendClient.connect(
            used,
            used.to_json(),
            sandbox_token=token or self.token(),
            supervisor_instance_id=instance,
            backend_name=backend_name,
        )
        self.clients.append(client)
        return client


def make_bootstrap(keys: Keys, socket_path: Path) -> BoundaryBootstrap:
    return BoundaryBootstrap(
        boundary_id=SANDBOX,
        generation=GENERATION,
        session_id=SESSION,
        session_rotation=1,
        auth_epoch=1,
        gateway_id=GATEWAY,
        verification_keys=(keys.verification,),
        listener=UnixListener(
            socket_path=str(socket_path),
            tls=ListenerTls(certificate_chain_path="/tls/chain.pem", private_key_path="/tls/key.pem"),
        ),
        resource_claims={"docker.container_id": "c1", "docker.image_identity": "sha256:1"},
        workload_identity=WorkloadIdentity(
            uid=1000, gid=1000, source=IdentitySource.DEFAULT, resource_digest="sha256:1"
        ),
        outer_fence=OuterFence.attest(generation=GENERATION, evidence=b"{}"),
        child_env={"LANG": "C.UTF-8"},
    )


def make_descriptor(bootstrap: BoundaryBootstrap, socket_path: Path, tls: SessionTls) -> RuntimeDescriptor:
    return RuntimeDescriptor(
        boundary_id=bootstrap.boundary_id,
        generation=bootstrap.generation,
        session_id=bootstrap.session_id,
        workload_identity=bootstrap.workload_identity,
        transport=UnixTransport(socket_path=str(socket_path)),
        tls=TransportTls(server_name=tls.server_name, trust_anchor_pem=tls.trust_anchor_pem),
        host_gateway_ip="127.0.0.1",
        resource_claims=bootstrap.resource_claims,
        outer_fence=bootstrap.outer_fence,
    )
