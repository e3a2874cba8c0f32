"""The boundary's states as a table: which event leads where, with which effects, or is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openshell.isolation.connection_states import (
    AgentStarted,
    AttachAsked,
    AttachDone,
    AwaitingConfirmation,
    BoundaryState,
    CloseConnection,
    ConfirmAsked,
    ConfirmDone,
    Connected,
    ConnectionState,
    Disconnected,
    DiscoveryAsked,
    Effect,
    Event,
    Freeze,
    Frozen,
    OperationAsked,
    RecoveryExpired,
    Resume,
    ResumeFailed,
    RuntimeState,
    Supervisor,
    Terminal,
    TerminateTree,
    Terminating,
    TerminationAsked,
    TerminationDone,
    advance,
)
from openshell.isolation.errors import BackendError, DescriptorError, TerminatedError, UnavailableError

ONE = Supervisor(instance_id="one", auth_epoch=1)
ONE_RENEWED = Supervisor(instance_id="one", auth_epoch=2)
TWO = Supervisor(instance_id="two", auth_epoch=1)
TWO_NEWER = Supervisor(instance_id="two", auth_epoch=2)

FRESH = BoundaryState()
BOUND = BoundaryState(runtime=RuntimeState.BOUND, attached={"a": ONE}, pinned=ONE)
BOUND_ALONE = replace(BOUND, attached={})
READY = replace(BOUND, runtime=RuntimeState.READY, connection=Connected("a"))
RUNNING = replace(READY, runtime=RuntimeState.RUNNING)
FROZEN = replace(RUNNING, attached={}, connection=Frozen(1), recoveries=1)
FROZEN_READY = replace(FROZEN, runtime=RuntimeState.READY)
FROZEN_BACK = replace(FROZEN, attached={"b": ONE})
RENEWING = replace(RUNNING, attached={"a": ONE, "b": ONE_RENEWED}, pinned=ONE_RENEWED)
TERMINATING = replace(RUNNING, connection=Terminating())
TERMINAL = replace(RUNNING, connection=Terminal())


def asked(connection_id: str, supervisor: Supervisor) -> AttachAsked:
    return AttachAsked(connection_id=connection_id, supervisor=supervisor)


def done(connection_id: str, supervisor: Supervisor) -> AttachDone:
    return AttachDone(connection_id=connection_id, supervisor=supervisor)


ALLOWED: list[tuple[str, BoundaryState, Event, BoundaryState, tuple[Effect, ...]]] = [
    ("the first attach may be tried", FRESH, asked("a", ONE), FRESH, ()),
    ("the first attach pins the supervisor", FRESH, done("a", ONE), BOUND, ()),
    (
        "an unconfirmed supervisor may attach again",
        BOUND_ALONE,
        done("b", ONE),
        replace(BOUND, attached={"b": ONE}),
        (),
    ),
    (
        "a newer supervisor may take over before confirmation",
        BOUND_ALONE,
        done("b", TWO_NEWER),
        replace(BOUND, attached={"b": TWO_NEWER}, pinned=TWO_NEWER),
        (),
    ),
    ("the active connection may attach again", RUNNING, done("a", ONE), RUNNING, ()),
    ("a renewed epoch may attach beside the active one", RUNNING, done("b", ONE_RENEWED), RENEWING, ()),
    ("a lost supervisor may come back", FROZEN, done("b", ONE), FROZEN_BACK, ()),
    (
        "a newer supervisor may take over while frozen",
        FROZEN,
        done("b", TWO_NEWER),
        replace(FROZEN, attached={"b": TWO_NEWER}, pinned=TWO_NEWER),
        (),
    ),
    ("the first confirm makes ready", BOUND, ConfirmDone(connection_id="a"), READY, ()),
    ("confirm may be repeated", RUNNING, ConfirmDone(connection_id="a"), RUNNING, ()),
    (
        "confirm resumes a frozen workload",
        FROZEN_BACK,
        ConfirmDone(connection_id="b"),
        replace(FROZEN_BACK, connection=Connected("b")),
        (Resume(running=True),),
    ),
    (
        "confirm has nothing to resume before the agent started",
        replace(FROZEN_READY, attached={"b": ONE}),
        ConfirmDone(connection_id="b"),
        replace(FROZEN_READY, attached={"b": ONE}, connection=Connected("b")),
        (Resume(running=False),),
    ),
    (
        "confirm closes the replaced connection",
        RENEWING,
        ConfirmDone(connection_id="b"),
        replace(RENEWING, connection=Connected("b")),
        (CloseConnection("a"),),
    ),
    (
        "a failed resume freezes again under a new deadline",
        replace(FROZEN_BACK, connection=Connected("b")),
        ResumeFailed(connection_id="b"),
        replace(FROZEN_BACK, connection=Frozen(2), recoveries=2),
        (Freeze(2),),
    ),
    ("a late resume failure changes nothing", FROZEN, ResumeFailed(connection_id="b"), FROZEN, ()),
    ("start makes running", READY, AgentStarted(), RUNNING, ()),
    ("the policy may be discovered at first", FRESH, DiscoveryAsked(connection_id="a"), FRESH, ()),
    ("the active connection may discover too", RUNNING, DiscoveryAsked(connection_id="a"), RUNNING, ()),
    ("the active connection may operate", RUNNING, OperationAsked(connection_id="a"), RUNNING, ()),
    ("losing the active connection freezes", RUNNING, Disconnected(connection_id="a"), FROZEN, (Freeze(1),)),
    (
        "also before the agent started",
        READY,
        Disconnected(connection_id="a"),
        FROZEN_READY,
        (Freeze(1),),
    ),
    ("losing any other connection is ignored", RUNNING, Disconnected(connection_id="x"), RUNNING, ()),
    ("losing an unconfirmed connection only forgets it", BOUND, Disconnected(connection_id="a"), BOUND_ALONE, ()),
    (
        "a lost replacement is not the active one",
        RENEWING,
        Disconnected(connection_id="b"),
        replace(RENEWING, attached={"a": ONE}),
        (),
    ),
    (
        "an expired recovery ends the boundary",
        FROZEN_BACK,
        RecoveryExpired(recovery_id=1),
        replace(FROZEN_BACK, connection=Terminating()),
        (CloseConnection("b"), TerminateTree(recovery_expired=True)),
    ),
    ("an older deadline means nothing", replace(FROZEN, connection=Frozen(2)), RecoveryExpired(recovery_id=1),
     replace(FROZEN, connection=Frozen(2)), ()),
    ("a deadline after recovery means nothing", RUNNING, RecoveryExpired(recovery_id=1), RUNNING, ()),
    (
        "termination revokes the other connections first",
        RENEWING,
        TerminationAsked(connection_id="a"),
        replace(RENEWING, connection=Terminating()),
        (CloseConnection("b"), TerminateTree(recovery_expired=False)),
    ),
    (
        "the runtime itself may terminate",
        RUNNING,
        TerminationAsked(),
        TERMINATING,
        (CloseConnection("a"), TerminateTree(recovery_expired=False)),
    ),
    (
        "an attached supervisor may terminate before confirmation",
        BOUND,
        TerminationAsked(connection_id="a"),
        replace(BOUND, connection=Terminating()),
        (TerminateTree(recovery_expired=False),),
    ),
    ("termination is idempotent while it runs", TERMINATING, TerminationAsked(connection_id="a"), TERMINATING, ()),
    ("termination is idempotent at the end", TERMINAL, TerminationAsked(connection_id="z"), TERMINAL, ()),
    ("termination ends", TERMINATING, TerminationDone(), TERMINAL, ()),
    ("nothing freezes during the end", TERMINATING, Disconnected(connection_id="a"),
     replace(TERMINATING, attached={}), ()),
]  # fmt: skip

REFUSED: list[tuple[str, BoundaryState, Event, type[BackendError], str]] = [
    (
        "a second connection of the same epoch",
        RUNNING,
        asked("b", ONE),
        UnavailableError,
        "another connection with this epoch is still active",
    ),
    ("another instance of the same epoch", RUNNING, asked("b", TWO), DescriptorError, "another supervisor instance"),
    ("another instance of the same epoch, frozen", FROZEN, asked("b", TWO), DescriptorError, "another supervisor"),
    ("another instance of the same epoch, bound", BOUND_ALONE, asked("b", TWO), DescriptorError, "another supervisor"),
    ("a newer instance while one is connected", RUNNING, asked("b", TWO_NEWER), UnavailableError, "still connected"),
    ("an older epoch", replace(FROZEN, pinned=ONE_RENEWED), asked("b", ONE), DescriptorError, "replaced by a newer"),
    ("an attach that lost a race", RUNNING, done("b", TWO), DescriptorError, "another supervisor instance"),
    ("confirm without attach", BOUND, ConfirmAsked(connection_id="b"), DescriptorError, "attached"),
    ("confirm of a replaced supervisor", RENEWING, ConfirmAsked(connection_id="a"), DescriptorError, "attached after"),
    ("confirm of a lost connection", FROZEN, ConfirmDone(connection_id="b"), DescriptorError, "attached"),
    ("operating before confirm", BOUND, OperationAsked(connection_id="a"), UnavailableError, "confirmed connection"),
    ("operating from elsewhere", RUNNING, OperationAsked(connection_id="b"), UnavailableError, "confirmed connection"),
    ("operating while frozen", FROZEN_BACK, OperationAsked(connection_id="b"), UnavailableError, "frozen"),
    (
        "waiting before the start",
        READY,
        OperationAsked(connection_id="a", needs=RuntimeState.RUNNING),
        DescriptorError,
        "while the boundary is ready",
    ),
    ("discovery beside the active one", RUNNING, DiscoveryAsked(connection_id="b"), UnavailableError, "active one"),
    ("termination by a stranger", RUNNING, TerminationAsked(connection_id="b"), UnavailableError, "may end"),
    ("termination by one who never attached", BOUND, TerminationAsked(connection_id="b"), UnavailableError, "may end"),
    *[
        (f"{type(event).__name__} in {name}", state, event, TerminatedError, "sandbox session is terminating")
        for name, state in (("Terminating", TERMINATING), ("Terminal", TERMINAL))
        for event in (
            asked("a", ONE),
            done("a", ONE),
            ConfirmAsked(connection_id="a"),
            ConfirmDone(connection_id="a"),
            OperationAsked(connection_id="a"),
            DiscoveryAsked(connection_id="a"),
        )
    ],
]


@pytest.mark.parametrize(
    ("state", "event", "after", "effects"), [row[1:] for row in ALLOWED], ids=[r[0] for r in ALLOWED]
)
def test_transitions(state: BoundaryState, event: Event, after: BoundaryState, effects: tuple[Effect, ...]) -> None:
    assert advance(state, event) == (after, effects)


@pytest.mark.parametrize(("state", "event", "error", "text"), [row[1:] for row in REFUSED], ids=[r[0] for r in REFUSED])
def test_refusals(state: BoundaryState, event: Event, error: type[BackendError], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        advance(state, event)
    assert not caught.value.is_refusal, "a state is never a refusal of the configuration"


connections = st.sampled_from(["a", "b", "c"])
supervisors = st.sampled_from([ONE, ONE_RENEWED, TWO, TWO_NEWER])
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(AttachAsked, connection_id=connections, supervisor=supervisors),
    st.builds(AttachDone, connection_id=connections, supervisor=supervisors),
    st.builds(ConfirmAsked, connection_id=connections),
    st.builds(ConfirmDone, connection_id=connections),
    st.builds(ResumeFailed, connection_id=connections),
    st.builds(OperationAsked, connection_id=connections),
    st.builds(Disconnected, connection_id=connections),
    st.builds(RecoveryExpired, recovery_id=st.integers(1, 3)),
    st.builds(TerminationAsked, connection_id=st.none() | connections),
    st.builds(TerminationDone),
)


@given(st.lists(events, max_size=30))
def test_whatever_happens_the_rules_hold(history: list[Event]) -> None:
    state = BoundaryState()
    ending = False
    for event in history:
        before = state
        try:
            state, effects = advance(state, event)
        except BackendError:
            continue
        frozen_now = isinstance(state.connection, Frozen)
        assert not ending or isinstance(state.connection, Terminating | Terminal), "an ending boundary stays ended"
        ending = isinstance(state.connection, Terminating | Terminal)
        if isinstance(state.connection, Connected) and state.connection != before.connection:
            assert state.attached[state.connection.connection_id] == state.pinned, (
                "only the pinned supervisor is active"
            )
        assert any(isinstance(e, Freeze) for e in effects) == (frozen_now and state.connection != before.connection), (
            "each entry into Frozen freezes once"
        )
        if state.pinned is not None and before.pinned is not None:
            assert state.pinned.auth_epoch >= before.pinned.auth_epoch, "epochs never go back"


def test_a_fresh_boundary_awaits_confirmation() -> None:
    connection: ConnectionState = FRESH.connection
    assert connection == AwaitingConfirmation()
    assert FRESH.runtime is RuntimeState.AWAITING_ATTACH
