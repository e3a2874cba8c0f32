"""Creating and deleting sandboxes: what is asked of the driver, in which order, and what its answers mean."""

from __future__ import annotations

import asyncio
import uuid
from datetime import timedelta

import structlog

from gateway_embedded import encoding, launches, policies, requests
from gateway_embedded.admission import INITIAL_CHANGE
from gateway_embedded.background import BackgroundTasks
from gateway_embedded.config import GatewayConfig
from gateway_embedded.driver_link import DriverLink
from gateway_embedded.encoding import TimestampRangeError
from gateway_embedded.errors import (
    DeletedMeanwhileError,
    DriverCallError,
    DriverUnreachableError,
    GatewayError,
    PreconditionError,
    SandboxExistsError,
    public_text,
)
from gateway_embedded.leftovers import Leftovers
from gateway_embedded.sandboxes import READY, Condition, Phase, Provisioning, SandboxRecord, SandboxStatus
from gateway_embedded.states import SandboxStates
from gateway_embedded.tokens import TokenAuthority, new_launch
from openshell.status import StatusCode
from openshell.wire.compute.v1 import compute_driver_pb2
from openshell.wire.v1 import openshell_pb2

ACCEPTED_TEXT = "Sandbox accepted; waiting for the compute driver"


class SandboxLifecycle:
    """The operations of users that reach the compute driver."""

    def __init__(
        self,
        states: SandboxStates,
        driver: DriverLink,
        authority: TokenAuthority,
        leftovers: Leftovers,
        tasks: BackgroundTasks,
        config: GatewayConfig,
    ) -> None:
        self._states = states
        self._driver = driver
        self._authority = authority
        self._leftovers = leftovers
        self._tasks = tasks
        self._config = config
        self._creations: dict[str, asyncio.Event] = {}
        """Creates that the driver works on; each is set when its answer is there."""
        self._deletions: dict[str, asyncio.Task[bool]] = {}
        self._log = structlog.get_logger("gateway.lifecycle")

    async def create(self, request: openshell_pb2.CreateSandboxRequest, workspace: str) -> SandboxRecord:
        """Validate, store and create a sandbox (compute-driver contract 3.5).

        The caller has checked the request; the record is erased again when the driver refuses.

        Raises:
            SandboxExistsError: The name is taken, here or at the driver.
            DeletedMeanwhileError: Someone deleted it before it was there.
            PreconditionError: The driver refuses it in this state.
            GatewayError: INTERNAL for any other failure of the driver's create, or whatever its validation answered.
        """
        name = request.name or requests.generated_name()
        if await self._states.store.find(workspace, name) is not None:
            raise _taken(name, workspace)
        identity = await self._driver.confirm("ValidateSandboxCreate")
        sandbox_id = str(uuid.uuid4())
        spec = launches.resolved_spec(request.spec, default_image=identity.default_image)
        wanted = launches.driver_sandbox(
            sandbox_id=sandbox_id,
            name=name,
            workspace=workspace,
            spec=spec,
            driver_name=self._config.compute_driver,
        )
        await self._driver.validate(wanted)
        record = await self._store(request, sandbox_id, name, workspace, spec)
        self._add_credentials(wanted, record)
        answered = self._creations[sandbox_id] = asyncio.Event()
        try:
            await self._driver.confirm("CreateSandbox")
            await self._driver.create(wanted)
        except GatewayError as error:
            self._log.warning("the driver refused a sandbox", sandbox_id=sandbox_id, sandbox=name, error=error.message)
            await self._states.remove(sandbox_id)
            raise _create_failed(error, name) from error
        finally:
            del self._creations[sandbox_id]
            answered.set()
        stored = await self._states.store.get(sandbox_id)
        if stored is None:
            self._leftovers.remove_later(sandbox_id, name)
        if stored is None or stored.status.phase is Phase.DELETING:
            raise DeletedMeanwhileError(f"sandbox {name!r} was deleted while it was being created")
        self._log.info("sandbox created", sandbox_id=sandbox_id, sandbox=name, workspace=workspace)
        return stored

    async def delete(self, workspace: str, name: str) -> openshell_pb2.DeleteSandboxResponse:
        """Delete a sandbox (compute-driver contract 3.8); a second call joins the first.

        Raises:
            SandboxNotFoundError: There is no such sandbox.
            GatewayError: INTERNAL when the driver failed; the sandbox is then as it was.
        """
        record = await self._states.find(workspace, name)
        task = self._deletions.get(record.id)
        if task is None:
            task = self._tasks.spawn(self._delete(record), name=f"delete {record.id}")
            self._deletions[record.id] = task
            task.add_done_callback(lambda _: self._deletions.pop(record.id, None))
        completed = await asyncio.shield(task)
        outcome = openshell_pb2.DELETION_OUTCOME_COMPLETED if completed else openshell_pb2.DELETION_OUTCOME_ACCEPTED
        return openshell_pb2.DeleteSandboxResponse(outcome=outcome, sandbox_id=record.id)

    async def stop_for_exit(self, record: SandboxRecord) -> None:
        """Stop a sandbox's compute without a change of what is stored about it."""
        try:
            await self._driver.stop(record.id, record.name)
        except DriverCallError as error:
            self._log.warning("a sandbox was not stopped at exit", sandbox_id=record.id, error=error.public_message)

    async def _store(
        self,
        request: openshell_pb2.CreateSandboxRequest,
        sandbox_id: str,
        name: str,
        workspace: str,
        spec: openshell_pb2.SandboxSpec,
    ) -> SandboxRecord:
        now = self._states.clock()
        waiting = Condition(type=READY, status="False", reason="Starting", message=ACCEPTED_TEXT, transition_time=now)
        attempt = str(uuid.uuid4())
        preparation = timedelta(seconds=self._config.deadlines.preparation_seconds)
        record = SandboxRecord(
            id=sandbox_id,
            name=name,
            workspace=workspace,
            created_at=now,
            spec=spec.SerializeToString(deterministic=True),
            launch=new_launch(),
            status=SandboxStatus(phase=Phase.PROVISIONING, conditions=(waiting,)),
            provisioning=Provisioning(
                attempt_id=attempt,
                preparation_deadline=now + preparation,
                configuration_change_id=f"{INITIAL_CHANGE}{attempt}",
                configuration_change_time=now,
            ),
            labels=dict(request.labels),
            annotations=dict(request.annotations),
        )
        policy = policies.first_revision(sandbox_id, spec.policy, now=now) if spec.HasField("policy") else None
        return await self._states.add(record, policy)

    def _add_credentials(self, wanted: compute_driver_pb2.DriverSandbox, record: SandboxRecord) -> None:
        tokens = self._authority.mint(record.id, record.launch, now=self._states.clock())
        wanted.spec.sandbox_token = tokens.gateway_token
        wanted.spec.launch_authentication = self._authority.launch_authentication(record.launch, tokens)

    async def _delete(self, before: SandboxRecord) -> bool:
        """Whether the record is gone already; otherwise a later `deleted` event, or the sweep, removes it."""
        now = self._states.clock()

        def mark(found: SandboxRecord) -> SandboxRecord:
            return found.with_status(phase=Phase.DELETING, deletion_time=found.status.deletion_time or now)

        marked = await self._states.change_if_stored(before.id, mark)
        if marked is None:
            return True
        creation = self._creations.get(before.id)
        try:
            was_there = await self._driver.delete(before.id, before.name)
            if creation is not None:
                # The driver may have been asked before it had heard of the sandbox.
                await creation.wait()
                if self._states.knows(before.id):
                    was_there = await self._driver.delete(before.id, before.name)
        except DriverCallError as error:
            await self._undo_delete(before)
            raise GatewayError(
                f"delete sandbox failed: {error.message}", reason="DELETE_FAILED", retryable=error.retryable
            ) from error
        if not was_there:
            await self._states.remove(before.id)
        return not self._states.knows(before.id)

    async def _undo_delete(self, before: SandboxRecord) -> None:
        """What is left after a failed delete is for the driver to say (compute-driver contract 3.8)."""
        limit = self._config.driver_timings.inspect_seconds
        snapshot = None
        try:
            found = await self._driver.get(before.id, before.name, timeout_seconds=limit)
            snapshot = encoding.from_driver_sandbox(found)
        except DriverCallError as error:
            if error.status is StatusCode.NOT_FOUND:
                await self._states.remove(before.id)
                return
        except TimestampRangeError:
            pass
        # A sandbox that was Deleting before, too, falls back to what its snapshot says.
        phase = Phase.UNKNOWN if before.status.phase is Phase.DELETING else before.status.phase

        def restore(found: SandboxRecord) -> SandboxRecord | None:
            if found.status.phase is not Phase.DELETING:
                return None
            restored = found.with_status(phase=phase, conditions=before.status.conditions, deletion_time=None)
            if snapshot is None:
                return restored
            return self._states.observed(restored, snapshot) or restored

        await self._states.change_if_stored(before.id, restore)


def _taken(name: str, workspace: str) -> SandboxExistsError:
    return SandboxExistsError(
        f"a sandbox named {name!r} exists in workspace {workspace!r}; delete it or choose another name"
    )


def _create_failed(error: GatewayError, name: str) -> GatewayError:
    """What a client sees when the driver refused to create (compute-driver contract 3.5)."""
    if error.status is StatusCode.ALREADY_EXISTS:
        return SandboxExistsError(error.message)
    if error.status is StatusCode.FAILED_PRECONDITION:
        return PreconditionError(error.message, reason=error.reason)
    if isinstance(error, DriverUnreachableError) and error.rpc != "CreateSandbox":
        return error  # The driver was not asked for anything yet.
    return GatewayError(
        public_text(f"create sandbox failed: {error.message}"),
        reason="CREATE_FAILED",
        retryable=error.retryable,
        facts={"sandbox": name},
    )
