"""A workload container with the sandbox runtime as PID 1, driven over its control socket."""

from __future__ import annotations

import asyncio
import io
import json
import os
import tarfile
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import docker
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from docker.errors import NotFound

from devtools.inventory import RUN_LABEL
from openshell.isolation.client import BackendClient
from openshell.isolation.documents import (
    BoundaryBootstrap,
    ListenerTls,
    OuterFence,
    RuntimeDescriptor,
    TransportTls,
    UnixListener,
    UnixTransport,
    VerificationKey,
    WorkloadIdentity,
)
from openshell.isolation.operations import AgentSpec, LandlockRequirement, Policy
from openshell.isolation.tls import SessionTls, issue_session_tls
from openshell.isolation.tokens import TokenClaims, mint_sandbox_token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from docker import APIClient
    from scripted.ownership import OwnerLabel

    from openshell.isolation.operations import Started

RUNTIME_FOLDER = "/.openshell/runtime"
CHANNEL = "/.openshell/channel"
SANDBOX_CHANNEL = f"{CHANNEL}/sandbox"
CA_FOLDER = "/run/openshell-supervisor-ca/material"
SOCKET_PATH = f"{SANDBOX_CHANNEL}/control.sock"
SANDBOX_ID = "sandbox-1"
GENERATION = "generation-1"
MAIN = f"{GENERATION}:main"
UID = 1000
POLICY = Policy(
    read_only=("/bin", "/etc", "/proc"),
    read_write=("/tmp", "/dev/null"),
    include_workdir=True,
    landlock=LandlockRequirement.HARD_REQUIREMENT,
)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a gateway and a driver make for one launch."""

    session_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate, repr=False)
    tls: SessionTls

    @classmethod
    def new(cls) -> Launch:
        session_id = str(uuid.uuid4())
        return cls(session_id=session_id, tls=issue_session_tls(session_id))

    def identity(self, uid: int = UID) -> WorkloadIdentity:
        return WorkloadIdentity(uid=uid, gid=uid, resource_digest="sha256:0")

    def fence(self) -> OuterFence:
        return OuterFence.attest(generation=GENERATION, evidence=b'{"network_mode":"none"}')

    def bootstrap(self, container_id: str, uid: int = UID) -> BoundaryBootstrap:
        public = self.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
        tls = ListenerTls(
            certificate_chain_path=f"{SANDBOX_CHANNEL}/server.crt", private_key_path=f"{SANDBOX_CHANNEL}/server.key"
        )
        return BoundaryBootstrap(
            boundary_id=SANDBOX_ID,
            generation=GENERATION,
            session_id=self.session_id,
            session_rotation=1,
            auth_epoch=1,
            gateway_id="gateway-1",
            verification_keys=(VerificationKey(key_id="k1", public_key_pem=public),),
            listener=UnixListener(socket_path=SOCKET_PATH, tls=tls),
            resource_claims={"docker.container_id": container_id},
            workload_identity=self.identity(uid),
            outer_fence=self.fence(),
            child_env={"GREETING": "hello"},
        )

    def descriptor(self, container_id: str, socket_path: Path) -> RuntimeDescriptor:
        return RuntimeDescriptor(
            boundary_id=SANDBOX_ID,
            generation=GENERATION,
            session_id=self.session_id,
            workload_identity=self.identity(),
            transport=UnixTransport(socket_path=str(socket_path)),
            tls=TransportTls(server_name=self.tls.server_name, trust_anchor_pem=self.tls.trust_anchor_pem),
            resource_claims={"docker.container_id": container_id},
            outer_fence=self.fence(),
        )

    def token(self) -> str:
        now = int(time.time())
        claims = TokenClaims(
            gateway_id="gateway-1",
            sandbox_id=SANDBOX_ID,
            runtime_generation=GENERATION,
            auth_epoch=1,
            token_id=str(uuid.uuid4()),
            issued_at=now,
            expires_at=now + 600,
        )
        pem = self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
        return mint_sandbox_token(claims, key_id="k1", private_key_pem=pem)


def archive(files: dict[str, bytes], uid: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        folder = tarfile.TarInfo("sandbox")
        folder.type, folder.mode, folder.uid, folder.gid = tarfile.DIRTYPE, 0o711, uid, uid
        tar.addfile(folder)
        for name, content in files.items():
            entry = tarfile.TarInfo(f"sandbox/{name}")
            entry.size, entry.mode, entry.uid, entry.gid = len(content), 0o600, uid, uid
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


class Sandbox:
    """One workload container."""

    def __init__(self, client: APIClient, container_id: str, launch: Launch, channel: Path) -> None:
        self.client = client
        self.id = container_id
        self.launch = launch
        # The engine's data may lie so deep that no socket below it can be named; a link to the volume is short.
        self._link = Path(tempfile.mkdtemp(prefix="ch-", dir="/tmp")) / "c"
        self._link.symlink_to(channel)
        self.channel = self._link
        self._open: list[BackendClient] = []

    async def listening(self) -> None:
        """Return once the control socket is there; the container's end ends the wait."""
        socket_path = self.channel / "sandbox" / "control.sock"
        async with asyncio.timeout(20):
            while not socket_path.exists():
                assert await self.running(), await self.log_text()
                await asyncio.sleep(0.01)

    async def supervisor(self, instance_id: str | None = None) -> BackendClient:
        """A connected, negotiated client."""
        await self.listening()
        descriptor = self.launch.descriptor(self.id, self.channel / "sandbox" / "control.sock")
        client = await BackendClient.connect(
            descriptor,
            descriptor.to_json(),
            sandbox_token=self.launch.token(),
            supervisor_instance_id=instance_id or str(uuid.uuid4()),
        )
        self._open.append(client)
        return client

    async def started(self, script: str, *, policy: Policy = POLICY, **spec: Any) -> tuple[BackendClient, Started]:
        """A supervisor that attached, confirmed and started ``sh -c script`` in /sandbox."""
        client = await self.supervisor()
        await client.attach(policy)
        await client.confirm()
        agent = AgentSpec(program="/bin/sh", args=("-c", script), workdir="/sandbox", **spec)
        return client, await client.start_agent(agent, policy)

    async def result_of(self, script: str, *, policy: Policy = POLICY) -> tuple[int, str]:
        """Exit code of ``sh -c script`` as the agent, and what it left in /sandbox/result."""
        client, started = await self.started(f"{{ {script}; }} > /sandbox/result 2>&1", policy=policy)
        code = (await client.wait(started.process_id)).exit_code
        return code, await self.file("/sandbox/result")

    async def file(self, path: str) -> str:
        """The content of a file in the container."""
        stream, _ = await asyncio.to_thread(self.client.get_archive, self.id, path)
        with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as tar:
            content = tar.extractfile(tar.next() or "")
            assert content is not None
            return content.read().decode()

    async def has_file(self, path: str) -> None:
        """Return once a file is there; only the container knows when."""
        async with asyncio.timeout(20):
            while True:
                try:
                    await self.file(path)
                except NotFound:
                    await asyncio.sleep(0.05)
                else:
                    return

    async def state_of(self, arguments: str, state: str) -> None:
        """Return once the process with this command line is in a state; only the kernel knows when."""
        async with asyncio.timeout(20):
            while not (await self.processes()).get(arguments, "?").startswith(state):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def signal(self, name: str) -> None:
        await asyncio.to_thread(self.client.kill, self.id, name)

    async def ended(self) -> int:
        """The exit code, once the container has ended."""
        found = await asyncio.to_thread(self.client.wait, self.id, timeout=60)
        return int(found["StatusCode"])

    async def running(self) -> bool:
        found: dict[str, Any] = await asyncio.to_thread(self.client.inspect_container, self.id)
        return bool(found["State"]["Running"])

    async def log_text(self) -> str:
        return (await asyncio.to_thread(self.client.logs, self.id)).decode()

    async def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (await self.log_text()).splitlines()]

    async def processes(self) -> dict[str, str]:
        """Command line to process state, of everything in the container."""
        table = await asyncio.to_thread(self.client.top, self.id, "-eo pid,stat,args")
        return {row[2]: row[1] for row in table["Processes"]}

    async def execute(self, *command: str, user: str = f"{UID}:{UID}") -> tuple[int, str]:
        """Run a command in the container by way of the engine."""

        def run() -> tuple[int, str]:
            made = self.client.exec_create(self.id, list(command), user=user)
            output = self.client.exec_start(made["Id"])
            return int(self.client.exec_inspect(made["Id"])["ExitCode"]), output.decode()

        return await asyncio.to_thread(run)

    async def close(self) -> None:
        self._link.unlink(missing_ok=True)
        self._link.parent.rmdir()
        for client in self._open:
            await client.close()


class Sandboxes:
    """Makes workload containers as a driver does (compute-driver contract 5.5)."""

    def __init__(self, client: APIClient, owner: OwnerLabel, runtime_volume: str, image: str) -> None:
        self._client = client
        self._owner = owner
        self._runtime_volume = runtime_volume
        self._image = image
        self.made: list[Sandbox] = []

    async def start(self, *, spoil: dict[str, bytes] | None = None, **overrides: Any) -> Sandbox:
        """Make and start a container. *overrides* replace what a driver would ask of the engine."""
        sandbox = await asyncio.to_thread(self._make, spoil or {}, overrides)
        self.made.append(sandbox)
        await asyncio.to_thread(self._client.start, sandbox.id)
        return sandbox

    def _make(self, spoil: dict[str, bytes], overrides: dict[str, Any]) -> Sandbox:
        image = overrides.pop("image", self._image)
        user = overrides.pop("user", f"{UID}:{UID}")
        uid = overrides.pop("uid", UID)
        volume = self._client.create_volume(labels=self._owner.labels)
        channel = Path(str(volume["Mountpoint"]))
        if os.geteuid() != 0 or not channel.is_dir():
            pytest.skip("the engine's volumes cannot be reached from here")
        host = {
            "network_mode": "none",
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges:true"],
            "binds": [f"{self._runtime_volume}:{RUNTIME_FOLDER}:ro", f"{volume['Name']}:{CHANNEL}:nocopy"],
            "tmpfs": {CA_FOLDER: f"rw,noexec,nosuid,nodev,size=1m,uid={uid},gid={uid},mode=0755"},
            "sysctls": {"net.ipv4.ip_unprivileged_port_start": "0"},
            "pids_limit": 2048,
            **overrides,
        }
        created = self._client.create_container(
            image,
            ["--bootstrap", f"{SANDBOX_CHANNEL}/bootstrap.json"],
            entrypoint=[f"{RUNTIME_FOLDER}/openshell-sandbox"],
            user=user,
            working_dir="/",
            environment={"OPENSHELL_LOG_LEVEL": "debug"},
            host_config=self._client.create_host_config(**host),
            labels=self._owner.labels,
        )
        container_id = str(created["Id"])
        launch = Launch.new()
        files = {
            "bootstrap.json": launch.bootstrap(container_id, uid).to_json(),
            "server.crt": launch.tls.certificate_chain_pem.encode(),
            "server.key": launch.tls.private_key_pem.encode(),
            **spoil,
        }
        self._client.put_archive(container_id, CHANNEL, archive(files, uid))
        return Sandbox(self._client, container_id, launch, channel)


class RuntimeVolumes:
    """Volumes with the runtime, one an image; filling one takes longer than most tests."""

    def __init__(self, docker_host: str) -> None:
        self._client = docker.APIClient(base_url=docker_host, version="auto", timeout=60)
        self._labels = {RUN_LABEL: os.environ.get("OPENSHELL_TEST_RUN", "by-hand")}
        self._by_image: dict[str, str] = {}

    def holding(self, image: str) -> str:
        """The volume; the engine fills it from the image when a container is made."""
        if image not in self._by_image:
            name = str(self._client.create_volume(labels=self._labels)["Name"])
            self._by_image[image] = name
            host = self._client.create_host_config(network_mode="none", binds=[f"{name}:{RUNTIME_FOLDER}"])
            made = self._client.create_container(image, ["never"], host_config=host, labels=self._labels)
            self._client.remove_container(made["Id"])
        return self._by_image[image]

    def close(self) -> None:
        for name in self._by_image.values():
            self._client.remove_volume(name, force=True)
        self._client.close()


@pytest.fixture(scope="module")
def runtime_volumes(docker_host: str) -> Iterator[RuntimeVolumes]:
    """Shared by the tests of a module, none of which can write to it."""
    volumes = RuntimeVolumes(docker_host)
    yield volumes
    volumes.close()


@pytest.fixture
async def sandboxes(
    docker_client: APIClient,
    owner_label: OwnerLabel,
    runtime_volumes: RuntimeVolumes,
    runtime_image: str,
    workload_image: str,
) -> AsyncIterator[Sandboxes]:
    """Makes workload containers; what is made is removed at the end."""
    made = Sandboxes(docker_client, owner_label, runtime_volumes.holding(runtime_image), workload_image)
    yield made
    for sandbox in made.made:
        await sandbox.close()
        with suppress(NotFound):  # before the module's volume goes
            await asyncio.to_thread(docker_client.remove_container, sandbox.id, force=True)
