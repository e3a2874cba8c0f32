"""Which supervisor connection may do what: the boundary's state as data, its changes as one pure function.

Isolation contract 3.6. ``advance(state, event)`` answers the next state and the effects that the server has to carry
out, or raises the error result that the peer gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from openshell.isolation.errors import BackendError, DescriptorError, TerminatedError, UnavailableError

SAME_EPOCH_ACTIVE = "another connection with this epoch is still active"
TERMINATING = "sandbox session is terminating"
NOT_RESUMED = "frozen workload could not be resumed"


class RuntimeState(Enum):
    """How far the boundary's life has come."""

    AWAITING_ATTACH = "awaiting_attach"
    BOUND = "bound"
    READY = "ready"
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class AwaitingConfirmation:
    """No connection has been confirmed yet."""


@dataclass(frozen=True, slots=True)
class Connected:
    """One connection is the active one."""

    connection_id: str


@dataclass(frozen=True, slots=True)
class Frozen:
    """The active connection was lost; the workload stands still until the deadline of this recovery."""

    recovery_id: int


@dataclass(frozen=True, slots=True)
class Terminating:
    """The boundary is being ended."""


@dataclass(frozen=True, slots=True)
class Terminal:
    """Nothing runs any more."""


ConnectionState = AwaitingConfirmation | Connected | Frozen | Terminating | Terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervisor:
    """Who speaks on a connection.

    Attributes:
        instance_id: UUID of the supervisor's start.
        auth_epoch: credential epoch of its token.
    """

    instance_id: str
    auth_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryState:
    """Everything that the decisions depend on.

    Attributes:
        runtime: how far the boundary's life has come.
        connection: which connection counts.
        attached: live connections that attached, by connection id.
        pinned: the supervisor that the boundary is bound to.
        recoveries: how many recoveries began; the newest one's number.
    """

    runtime: RuntimeState = RuntimeState.AWAITING_ATTACH
    connection: ConnectionState = AwaitingConfirmation()
    attached: Mapping[str, Supervisor] = field(default_factory=dict)
    pinned: Supervisor | None = None
    recoveries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachAsked:
    """A connection asks to attach; refused here, or to be carried out."""

    connection_id: str
    supervisor: Supervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachDone:
    """The backend is attached for that connection."""

    connection_id: str
    supervisor: Supervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmAsked:
    """A connection asks to confirm; refused here, or to be carried out."""

    connection_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmDone:
    """The backend confirmed for that connection."""

    connection_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeFailed:
    """The workload could not be resumed for that connection."""

    connection_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationAsked:
    """A connection asks for an operation that only the active connection may ask for."""

    connection_id: str
    needs: RuntimeState = RuntimeState.READY


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryAsked:
    """A connection asks for the image's policy, which is allowed before Attach."""

    connection_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStarted:
    """The main process runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected:
    """A physical connection is gone."""

    connection_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryExpired:
    """The deadline of a recovery passed."""

    recovery_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminationAsked:
    """A connection, or with none the runtime itself, asks to end the boundary."""

    connection_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminationDone:
    """Nothing runs any more."""


Event = (
    AttachAsked
    | AttachDone
    | ConfirmAsked
    | ConfirmDone
    | ResumeFailed
    | OperationAsked
    | DiscoveryAsked
    | AgentStarted
    | Disconnected
    | RecoveryExpired
    | TerminationAsked
    | TerminationDone
)


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """Cut a physical connection."""

    connection_id: str


@dataclass(frozen=True, slots=True)
class Freeze:
    """Stop the workload and start the recovery's deadline."""

    recovery_id: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Let the workload run again; for a boundary whose agent never started there is nothing to resume."""

    running: bool


@dataclass(frozen=True, slots=True)
class TerminateTree:
    """End every process, then report :class:`TerminationDone`."""

    recovery_expired: bool


Effect = CloseConnection | Freeze | Resume | TerminateTree

_RUNTIME_ORDER = tuple(RuntimeState)


def advance(state: BoundaryState, event: Event) -> tuple[BoundaryState, tuple[Effect, ...]]:
    """The next state and what has to be done.

    Raises:
        BackendError: the event is a request that is refused; the state does not change.
    """
    match event:
        case AttachAsked():
            _check_attach(state, event)
            return state, ()
        case AttachDone():
            return _attached(state, event), ()
        case ConfirmAsked():
            _check_confirm(state, event.connection_id)
            return state, ()
        case ConfirmDone():
            return _confirmed(state, event.connection_id)
        case ResumeFailed():
            if state.connection == Connected(event.connection_id):
                return _frozen(state)
            return state, ()
        case OperationAsked():
            _check_operation(state, event)
            return state, ()
        case DiscoveryAsked():
            _refuse_when_ending(state)
            if isinstance(state.connection, Connected) and state.connection.connection_id != event.connection_id:
                raise UnavailableError("another connection is the active one")
            return state, ()
        case AgentStarted():
            return replace(state, runtime=RuntimeState.RUNNING), ()
        case Disconnected():
            remaining = {k: v for k, v in state.attached.items() if k != event.connection_id}
            was_active = state.connection == Connected(event.connection_id)
            state = replace(state, attached=remaining)
            return _frozen(state) if was_active else (state, ())
        case RecoveryExpired():
            if state.connection == Frozen(event.recovery_id):
                return _terminating(state, keep=None, recovery_expired=True)
            return state, ()
        case TerminationAsked():
            return _terminate(state, event.connection_id)
        case TerminationDone():
            return replace(state, connection=Terminal()), ()


def _refuse_when_ending(state: BoundaryState) -> None:
    if isinstance(state.connection, Terminating | Terminal):
        raise TerminatedError(TERMINATING)


def _check_attach(state: BoundaryState, event: AttachAsked) -> None:
    _refuse_when_ending(state)
    asking, pinned = event.supervisor, state.pinned
    active = state.connection.connection_id if isinstance(state.connection, Connected) else None
    if pinned is None or active == event.connection_id:
        return
    if asking.auth_epoch < pinned.auth_epoch:
        raise DescriptorError("this supervisor's credential epoch was replaced by a newer one")
    same_instance = asking.instance_id == pinned.instance_id
    newer = asking.auth_epoch > pinned.auth_epoch
    if not same_instance and not newer:
        raise DescriptorError("the boundary is bound to another supervisor instance of the same credential epoch")
    if active is not None:
        if not newer:
            raise UnavailableError(SAME_EPOCH_ACTIVE)
        if not same_instance:
            raise UnavailableError("another supervisor instance is still connected")


def _attached(state: BoundaryState, event: AttachDone) -> BoundaryState:
    # The answer may come after the end, or after the connection was replaced: then nothing is bound.
    _check_attach(state, AttachAsked(connection_id=event.connection_id, supervisor=event.supervisor))
    runtime = RuntimeState.BOUND if state.runtime is RuntimeState.AWAITING_ATTACH else state.runtime
    return replace(
        state,
        runtime=runtime,
        attached={**state.attached, event.connection_id: event.supervisor},
        pinned=event.supervisor,
    )


def _check_confirm(state: BoundaryState, connection_id: str) -> None:
    _refuse_when_ending(state)
    supervisor = state.attached.get(connection_id)
    if supervisor is None:
        raise DescriptorError("confirm needs a connection that attached")
    if supervisor != state.pinned:
        raise DescriptorError("another supervisor attached after this one")


def _confirmed(state: BoundaryState, connection_id: str) -> tuple[BoundaryState, tuple[Effect, ...]]:
    _check_confirm(state, connection_id)
    effects: list[Effect] = []
    if isinstance(state.connection, Connected) and state.connection.connection_id != connection_id:
        effects.append(CloseConnection(state.connection.connection_id))
    if isinstance(state.connection, Frozen):
        effects.append(Resume(running=state.runtime is RuntimeState.RUNNING))
    runtime = RuntimeState.READY if state.runtime is RuntimeState.BOUND else state.runtime
    return replace(state, runtime=runtime, connection=Connected(connection_id)), tuple(effects)


def _check_operation(state: BoundaryState, event: OperationAsked) -> None:
    _refuse_when_ending(state)
    if state.connection != Connected(event.connection_id):
        if isinstance(state.connection, Frozen):
            raise UnavailableError("the workload is frozen until a supervisor attaches and confirms")
        raise UnavailableError("the operation needs the confirmed connection")
    if _RUNTIME_ORDER.index(state.runtime) < _RUNTIME_ORDER.index(event.needs):
        raise DescriptorError(f"the operation is not allowed while the boundary is {state.runtime.value}")


def _frozen(state: BoundaryState) -> tuple[BoundaryState, tuple[Effect, ...]]:
    recovery = state.recoveries + 1
    return replace(state, connection=Frozen(recovery), recoveries=recovery), (Freeze(recovery),)


def _terminate(state: BoundaryState, connection_id: str | None) -> tuple[BoundaryState, tuple[Effect, ...]]:
    if isinstance(state.connection, Terminating | Terminal):
        return state, ()
    if connection_id is not None:
        active = state.connection.connection_id if isinstance(state.connection, Connected) else None
        if connection_id != active and (active is not None or connection_id not in state.attached):
            raise UnavailableError("only the confirmed or attached supervisor may end the boundary")
    return _terminating(state, keep=connection_id, recovery_expired=False)


def _terminating(
    state: BoundaryState, *, keep: str | None, recovery_expired: bool
) -> tuple[BoundaryState, tuple[Effect, ...]]:
    # Connections first, so that nothing is asked of a boundary that is going away; the asker hears the answer.
    cut = [CloseConnection(name) for name in state.attached if name != keep]
    if isinstance(state.connection, Connected) and state.connection.connection_id not in (keep, *state.attached):
        cut.append(CloseConnection(state.connection.connection_id))
    return replace(state, connection=Terminating()), (*cut, TerminateTree(recovery_expired))


__all__ = [
    "NOT_RESUMED",
    "SAME_EPOCH_ACTIVE",
    "TERMINATING",
    "AgentStarted",
    "AttachAsked",
    "AttachDone",
    "AwaitingConfirmation",
    "BackendError",
    "BoundaryState",
    "CloseConnection",
    "ConfirmAsked",
    "ConfirmDone",
    "Connected",
    "ConnectionState",
    "Disconnected",
    "DiscoveryAsked",
    "Effect",
    "Event",
    "Freeze",
    "Frozen",
    "OperationAsked",
    "RecoveryExpired",
    "Resume",
    "ResumeFailed",
    "RuntimeState",
    "Supervisor",
    "Terminal",
    "TerminateTree",
    "Terminating",
    "TerminationAsked",
    "TerminationDone",
    "advance",
]
