"""A boundary's life behind the wire: states, replay, freeze and recovery around a backend (isolation contract 3.6)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace

from openshell.isolation import connection_states as states
from openshell.isolation.backend import Backend
from openshell.isolation.connection_states import BoundaryState, RuntimeState, Supervisor, advance
from openshell.isolation.documents import BoundaryBootstrap
from openshell.isolation.envelope import RequestEnvelope
from openshell.isolation.errors import (
    BackendError,
    DescriptorError,
    IsolationError,
    ProcessError,
    UnavailableError,
)
from openshell.isolation.operations import (
    Attach,
    Attached,
    BoundaryTerminated,
    Confirm,
    Confirmed,
    DiscoverPolicy,
    Exited,
    Policy,
    ProbeProviderFiles,
    ProviderFilesSupported,
    Request,
    Result,
    Signaled,
    SignalProcess,
    StartAgent,
    Terminate,
    TerminateBoundary,
    Terminated,
    UpdateProviderEnvironment,
    Wait,
)
from openshell.isolation.replay import ReplayLedger

logger = logging.getLogger(__name__)

RECOVERY_SECONDS = 30.0
"""How long a frozen workload waits for its supervisor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthenticatedPeer:
    """A connection that opened the boundary.

    Attributes:
        connection_id: the physical connection.
        auth_epoch: credential epoch of its token.
    """

    connection_id: str
    auth_epoch: int


class BoundarySession:
    """Serves requests for one boundary and keeps its state.

    Args:
        backend: the backend.
        bootstrap: what the boundary was provisioned as.
        close_connection: cuts a physical connection by its id.
        recovery_seconds: how long a frozen workload waits for its supervisor.

    Attributes:
        state: the state as it is now.
        terminal: set once the boundary is Terminal.
        recovery_expired: whether the boundary ends because no supervisor came back in time.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bootstrap: BoundaryBootstrap,
        close_connection: Callable[[str], None],
        recovery_seconds: float = RECOVERY_SECONDS,
    ) -> None:
        self.state = BoundaryState()
        self.terminal = asyncio.Event()
        self.recovery_expired = False
        self._backend = backend
        self._bootstrap = bootstrap
        self._close_connection = close_connection
        self._recovery_seconds = recovery_seconds
        self._ledger = ReplayLedger()
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._recovery_timer: asyncio.TimerHandle | None = None
        self._attached: Attach | None = None
        self._termination_failure: str | None = None
        self._leaving = False

    async def handle(self, peer: AuthenticatedPeer, envelope: RequestEnvelope) -> Result:
        """Answer one request.

        Raises:
            BackendError: the error result that the peer gets.
            DocumentError: the request does not have the contract's form.
        """
        request = envelope.open()
        match request:
            case Attach():
                return await self._attach(peer, envelope, request)
            case Confirm():
                return await self._confirm(peer, envelope)
            case TerminateBoundary():
                self._step(states.TerminationAsked(connection_id=peer.connection_id))
                return await self._ledger.run(envelope, self._terminated)
            case DiscoverPolicy():
                self._step(states.DiscoveryAsked(connection_id=peer.connection_id))
                return await self._backend.discover_policy()
            case _:
                return await self._operate(peer, envelope, request)

    def disconnected(self, connection_id: str) -> None:
        """A physical connection is gone."""
        if self._leaving:
            return
        self._step(states.Disconnected(connection_id=connection_id))

    async def terminate(self) -> None:
        """End the boundary from this side and return once nothing runs any more; idempotent."""
        self._step(states.TerminationAsked())
        await self.terminal.wait()

    def leave(self) -> None:
        """From here on connections are cut from this side: no loss, and nothing to recover."""
        self._leaving = True

    async def close(self) -> None:
        """Release tasks and timers; the workload is left as it is."""
        self._cancel_recovery_timer()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._ledger.close()

    async def _attach(self, peer: AuthenticatedPeer, envelope: RequestEnvelope, request: Attach) -> Result:
        supervisor = Supervisor(instance_id=request.supervisor_instance_id, auth_epoch=peer.auth_epoch)
        self._step(states.AttachAsked(connection_id=peer.connection_id, supervisor=supervisor))
        if dict(request.resource_claims) != dict(self._bootstrap.resource_claims):
            raise DescriptorError("the resource claims differ from those that the boundary was provisioned with")
        result = await self._ledger.run(envelope, lambda: self._attach_backend(request))
        self._step(states.AttachDone(connection_id=peer.connection_id, supervisor=supervisor))
        return result

    async def _attach_backend(self, request: Attach) -> Result:
        async with self._changing:
            if self._attached is None:
                snapshot = await self._backend.attach(request)
                self._attached = request
                return Attached(snapshot=snapshot)
            if _static(request.policy) != _static(self._attached.policy):
                # No refusal of the configuration: this one may be enforceable, and the workload runs with the other.
                raise DescriptorError("the boundary already enforces another policy")
            return Attached(snapshot=await self._backend.snapshot())

    async def _confirm(self, peer: AuthenticatedPeer, envelope: RequestEnvelope) -> Result:
        self._step(states.ConfirmAsked(connection_id=peer.connection_id))
        result = await self._ledger.run(envelope, self._confirm_backend)
        # Every connection that confirms becomes the active one, also when the evidence came from the ledger; the
        # promotion runs to its end even if the connection is lost meanwhile.
        promotion = self._spawn(self._promote(peer.connection_id), "promote")
        await asyncio.shield(promotion)
        return result

    async def _confirm_backend(self) -> Result:
        async with self._changing:
            return Confirmed(confirmation=await self._backend.confirm())

    async def _promote(self, connection_id: str) -> None:
        async with self._changing:
            effects = self._change(states.ConfirmDone(connection_id=connection_id))
            self._carry_out(effects)
            resume = next((e for e in effects if isinstance(e, states.Resume)), None)
            if resume is None:
                return
            self._cancel_recovery_timer()
            if resume.running:
                try:
                    await self._backend.resume()
                except Exception as error:
                    logger.exception("the frozen workload could not be resumed")
                    self._step(states.ResumeFailed(connection_id=connection_id))
                    raise UnavailableError(states.NOT_RESUMED) from error
            logger.info("Sandbox Protocol connection recovered; workload resumed")

    async def _operate(self, peer: AuthenticatedPeer, envelope: RequestEnvelope, request: Request) -> Result:
        ready = isinstance(request, StartAgent | ProbeProviderFiles)
        needs = RuntimeState.READY if ready else RuntimeState.RUNNING
        self._step(states.OperationAsked(connection_id=peer.connection_id, needs=needs))
        if request.replayable:
            return await self._ledger.run(envelope, lambda: self._carry_out_request(request))
        return await self._carry_out_request(request)

    async def _carry_out_request(self, request: Request) -> Result:
        match request:
            case StartAgent():
                return await self._start_agent(request)
            case Wait():
                return Exited(status=await self._backend.wait(request.process_id))
            case SignalProcess():
                await self._backend.signal(request.process_id, request.signal)
                return Signaled()
            case Terminate():
                await self._backend.terminate(request.process_id)
                return Terminated()
            case UpdateProviderEnvironment():
                return await self._backend.update_provider_environment(request)
            case ProbeProviderFiles() if await self._backend.supports_provider_files():
                return ProviderFilesSupported()
            case _:
                raise UnavailableError(f"{request.TAG[1]} is not offered by this backend")

    async def _start_agent(self, request: StartAgent) -> Result:
        async with self._changing:
            if self.state.runtime is RuntimeState.RUNNING:
                raise ProcessError("the agent was already started")
            if request.sandbox_id != self._bootstrap.boundary_id:
                raise DescriptorError("the sandbox id differs from the boundary's")
            if self._attached is None or _static(request.policy) != _static(self._attached.policy):
                raise DescriptorError("the policy differs from the attached one")
            started = await self._backend.start_agent(request)
            self._step(states.AgentStarted())
            return started

    async def _terminated(self) -> Result:
        await self.terminal.wait()
        if self._termination_failure is not None:
            raise ProcessError(self._termination_failure)
        return BoundaryTerminated()

    def _change(self, event: states.Event) -> tuple[states.Effect, ...]:
        self.state, effects = advance(self.state, event)
        return effects

    def _step(self, event: states.Event) -> None:
        self._carry_out(self._change(event))

    def _carry_out(self, effects: tuple[states.Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case states.CloseConnection():
                    self._close_connection(effect.connection_id)
                case states.Freeze():
                    self._begin_recovery(effect.recovery_id)
                case states.TerminateTree():
                    self._cancel_recovery_timer()
                    self.recovery_expired = effect.recovery_expired
                    self._spawn(self._terminate_tree(), "terminate")
                case states.Resume():
                    pass  # belongs to the promotion, which reports its failure to the asker

    def _begin_recovery(self, recovery_id: int) -> None:
        logger.warning(
            "Sandbox Protocol connection lost; workload frozen pending authenticated recovery",
            extra={"finding": "sandbox-supervisor-connection-lost", "severity": "Medium", "confidence": "High"},
        )
        self._cancel_recovery_timer()
        self._recovery_timer = asyncio.get_running_loop().call_later(
            self._recovery_seconds, self._recovery_expired, recovery_id
        )
        self._spawn(self._freeze(recovery_id), "freeze")

    def _recovery_expired(self, recovery_id: int) -> None:
        if self.state.connection == states.Frozen(recovery_id):
            logger.error(
                "Sandbox Protocol recovery deadline expired; terminating workload",
                extra={"finding": "sandbox-supervisor-recovery-expired", "severity": "High", "confidence": "High"},
            )
        self._step(states.RecoveryExpired(recovery_id=recovery_id))

    async def _freeze(self, recovery_id: int) -> None:
        async with self._changing:
            current = self.state.connection == states.Frozen(recovery_id)
            if not current or self.state.runtime is not RuntimeState.RUNNING:
                return
            try:
                await self._backend.freeze()
            except Exception:
                logger.exception("the workload could not be frozen; ending it instead")
                self._step(states.TerminationAsked())

    async def _terminate_tree(self) -> None:
        # Without the lock: a call that hangs must not keep the workload alive.
        try:
            await self._backend.terminate_boundary()
        except Exception as error:
            logger.exception("the boundary's processes could not be ended")
            words = error.message if isinstance(error, IsolationError) else "the backend failed internally"
            self._termination_failure = f"the boundary's processes could not be ended: {words}"
        self._step(states.TerminationDone())
        self.terminal.set()

    def _cancel_recovery_timer(self) -> None:
        if self._recovery_timer is not None:
            self._recovery_timer.cancel()
            self._recovery_timer = None

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"boundary-{name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, BackendError):
            logger.error("a boundary task failed", exc_info=error)


def _static(policy: Policy) -> Policy:
    # The proxy's address is known only once networking runs, after Attach.
    return replace(policy, proxy_addr=None)
