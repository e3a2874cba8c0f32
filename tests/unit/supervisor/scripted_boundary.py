"""A boundary without a wire whose answers a test decides: for the order of calls and for failures of each stage."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from openshell.isolation.operations import (
    Confirmation,
    EnforcedProperty,
    ExitStatus,
    ImagePolicy,
    Properties,
    SessionSnapshot,
    Started,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from openshell.isolation.errors import IsolationError
    from openshell.isolation.operations import AgentSpec, Policy
    from supervisor_reference.selection import BoundaryPlan

PROCESS_ID = "generation-1:main"


class ScriptedBoundary:
    """Records the calls; a call named in `errors` fails."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.errors: dict[str, IsolationError] = {}
        self.image_policy = ImagePolicy()
        self.snapshot = SessionSnapshot(generation="generation-1")
        self.policy: Policy | None = None
        self.spec: AgentSpec | None = None
        self.environment: Mapping[str, str] = {}
        self.ended: asyncio.Future[ExitStatus] = asyncio.get_running_loop().create_future()
        self.hangs_on_terminate = False
        self.tokens: list[str] = []
        self.renewal_errors: list[IsolationError] = []
        self._plan: BoundaryPlan | None = None

    async def open(self, plan: BoundaryPlan, *, sandbox_token: str, instance_id: str) -> ScriptedBoundary:
        """Open, see `supervisor_reference.boundary.OpenBoundary`."""
        self._take("open")
        self._plan = plan
        return self

    async def discover_policy(self) -> ImagePolicy:
        self._take("discover_policy")
        return self.image_policy

    async def attach(self, policy: Policy) -> SessionSnapshot:
        self.policy = policy
        self._take("attach")
        return self.snapshot

    async def confirm(self) -> Confirmation:
        self._take("confirm")
        assert self._plan is not None
        described = self._plan.descriptor
        enforced = EnforcedProperty(mechanism="scripted")
        return Confirmation(
            generation=described.generation,
            identity=described.workload_identity,
            properties=Properties(
                filesystem_confinement=enforced,
                egress_interception=enforced,
                request_attribution=enforced,
                privilege_floor=enforced,
            ),
            session_id=described.session_id,
            outer_fence=described.outer_fence,
            resource_claims=described.resource_claims,
        )

    async def start_agent(
        self,
        spec: AgentSpec,
        policy: Policy,
        *,
        provider_env_revision: int = 0,
        provider_env: Mapping[str, str] | None = None,
        provider_files: Mapping[str, bytes] | None = None,
    ) -> Started:
        self.spec = spec
        self.environment = provider_env or {}
        self._take("start_agent")
        return Started(process_id=PROCESS_ID)

    async def wait(self, process_id: str) -> ExitStatus:
        self._take("wait")
        assert process_id == PROCESS_ID
        return await asyncio.shield(self.ended)

    async def renew_token(self, sandbox_token: str) -> None:
        self.tokens.append(sandbox_token)
        if self.renewal_errors:
            raise self.renewal_errors.pop(0)

    async def terminate_boundary(self) -> None:
        self._take("terminate_boundary")
        if self.hangs_on_terminate:
            await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        self.calls.append("close")

    def _take(self, call: str) -> None:
        self.calls.append(call)
        if call in self.errors:
            raise self.errors[call]
