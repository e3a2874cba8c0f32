"""A control supervisor that speaks to a gateway step by step, as a test tells it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from typing import Any

import grpc

from openshell.wire.compute.v1 import compute_driver_pb2
from openshell.wire.sandbox.v1 import sandbox_pb2
from openshell.wire.v1 import openshell_pb2 as pb
from openshell.wire.v1 import openshell_pb2_grpc as pb_grpc

DEFAULT_POLICY = sandbox_pb2.SandboxPolicy(
    version=1, filesystem=sandbox_pb2.FilesystemPolicy(read_only=["/usr"], read_write=["/tmp"])
)


async def offer(call: grpc.aio.StreamStreamCall[Any, Any], first: pb.SupervisorMessage) -> None:
    """Begin a session with any message, for `refused`: the write too may tell a refusal, once it is there."""
    await call.write(first)
    await call.read()


class ScriptedSupervisor:
    """Speaks with the credentials that the gateway gave the driver for one sandbox."""

    def __init__(self, target: str, created: compute_driver_pb2.DriverSandbox) -> None:
        bundle = json.loads(created.spec.launch_authentication)["supervisor"]
        self.sandbox_id = created.id
        self.sandbox_name = created.name
        self.instance_id = str(uuid.uuid4())
        self.metadata = (("authorization", f"Bearer {bundle['gateway_token']}"),)
        self.channel = grpc.aio.insecure_channel(target)
        self.stub: pb_grpc.OpenShellAsyncStub = pb_grpc.OpenShellStub(self.channel)
        self._session: grpc.aio.StreamStreamCall[Any, Any] | None = None

    async def configuration(self) -> sandbox_pb2.GetSandboxConfigResponse:
        """The effective configuration."""
        request = sandbox_pb2.GetSandboxConfigRequest(name=self.sandbox_name)
        return await self.stub.GetSandboxConfig(request, metadata=self.metadata)

    async def report(
        self,
        state: pb.ConfigurationAdmissionState.ValueType,
        *,
        expected: str = "",
        refused: bool = False,
        instance_id: str = "",
    ) -> None:
        """Report on the configuration as it is now."""
        seen = await self.configuration()
        admission = pb.SandboxConfigurationAdmission(
            instance_id=instance_id or self.instance_id,
            state=state,
            policy_version=seen.version,
            policy_hash=seen.policy_hash,
            config_revision=seen.config_revision,
            provider_env_revision=seen.provider_env_revision,
        )
        request = pb.ReportSandboxConfigurationRequest(
            sandbox_id=self.sandbox_id,
            admission=admission,
            expected_instance_id=expected,
            refused_before_start=refused,
        )
        await self.stub.ReportSandboxConfiguration(request, metadata=self.metadata)

    async def admit(self) -> None:
        """Register, write back a policy where there is none, and accept."""
        seen = await self.configuration()
        await self.report(pb.CONFIGURATION_ADMISSION_STATE_PENDING, expected=seen.configuration_instance_id)
        if not seen.HasField("policy"):
            request = pb.UpdateConfigRequest(sandbox=self.sandbox_name, policy=DEFAULT_POLICY)
            await self.stub.UpdateConfig(request, metadata=self.metadata)
        await self.report(pb.CONFIGURATION_ADMISSION_STATE_ACCEPTED)

    async def connect(self) -> pb.SessionAccepted:
        """Open the session; it stays open until `disconnect`."""
        self._session = self.stub.ConnectSupervisor(metadata=self.metadata)
        hello = pb.SupervisorHello(sandbox_id=self.sandbox_id, instance_id=self.instance_id)
        await self._session.write(pb.SupervisorMessage(hello=hello))
        answer = await self.hear()
        assert answer.WhichOneof("payload") == "session_accepted"
        return answer.session_accepted

    async def beat(self) -> None:
        """Send one heartbeat."""
        assert self._session is not None
        await self._session.write(pb.SupervisorMessage(heartbeat=pb.SupervisorHeartbeat()))

    async def hear(self) -> pb.GatewayMessage:
        """The next message of the gateway."""
        assert self._session is not None
        message: Any = await asyncio.wait_for(self._session.read(), 10)
        assert isinstance(message, pb.GatewayMessage)
        return message

    async def session_status(self) -> grpc.StatusCode:
        """How the gateway ended the session."""
        assert self._session is not None
        with contextlib.suppress(grpc.aio.AioRpcError):
            async with asyncio.timeout(10):
                while await self._session.read() is not grpc.aio.EOF:
                    pass
        return await self._session.code()

    async def disconnect(self) -> None:
        """Break the session."""
        assert self._session is not None
        self._session.cancel()
        await asyncio.sleep(0)

    async def run(self) -> None:
        """What a healthy supervisor does up to its session."""
        await self.admit()
        await self.connect()

    async def close(self) -> None:
        """Let go of the gateway."""
        await self.channel.close()
