"""The supervisor's session with its gateway (``ConnectSupervisor``; design of isolation contract 4 and 5).

Hello is answered by Accepted, which names the heartbeat's interval; then each side is heard from at least once an
interval, and three missed ones end the session. How a session ends decides what follows (`after_session`):

=================================================== ====================================================================
The gateway                                         The supervisor
=================================================== ====================================================================
ends the stream with OK                             stops: the sandbox is to end in order
ends it with UNAVAILABLE, or nothing is heard of it reconnects with growing pauses for as long as the workload runs
refuses the token (UNAUTHENTICATED)                 renews the tokens once, then reconnects: the gateway may have been
                                                    away for longer than a token lives
rejects the session, or ends it with another code   gives up: another instance serves the sandbox, or it is gone
=================================================== ====================================================================

Configuration pushes, redirects and relays are not built: Hello does not offer the first two, and a relay request is
answered with a failure that says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from openshell.isolation.errors import IsolationError, cause_of
from openshell.status import StatusCode
from openshell.verdicts import Category, Stage
from openshell.wire.v1 import openshell_pb2
from supervisor_reference.backoff import pause_after
from supervisor_reference.errors import GatewayError, StageError
from supervisor_reference.health import readiness_listener, say_ready

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from openshell.wire.v1.openshell_pb2 import GatewayMessage
    from supervisor_reference.gateway import Gateway, SupervisorStream
    from supervisor_reference.timing import Timing

_log = logging.getLogger(__name__)

MISSED_HEARTBEATS: Final = 3
"""Intervals without a word from the gateway after which a session is over."""

_FINAL: Final = frozenset(
    {
        StatusCode.UNAUTHENTICATED,
        StatusCode.PERMISSION_DENIED,
        StatusCode.NOT_FOUND,
        StatusCode.FAILED_PRECONDITION,
        StatusCode.INVALID_ARGUMENT,
        StatusCode.UNIMPLEMENTED,
        # Another instance has taken this one's place: coming back would only take it away again.
        StatusCode.ABORTED,
    }
)
_UNANSWERED: Final = frozenset({StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED})


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamClosed:
    """The gateway ended the stream with OK."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLost:
    """The stream broke, or ended with an error."""

    status: StatusCode
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySilent:
    """Nothing was heard of the gateway for too long."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRejected:
    """The gateway would not have this instance."""

    reason: str


SessionEnd = StreamClosed | StreamLost | GatewaySilent | SessionRejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End the sandbox in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconnect:
    """Try again after a pause."""

    pause_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """No session can be had any more."""

    category: Category
    public: str
    private: str = ""


NextStep = Stop | Reconnect | GiveUp


def after_session(end: SessionEnd, *, attempt: int, timing: Timing, renewed: bool = False) -> NextStep:
    """Decide what follows the end of a session.

    Args:
        end: How it ended.
        attempt: Sessions in a row that ended without having been accepted, this one included; 0 for one that was.
        timing: Pauses.
        renewed: Whether a refused token was renewed since, or may still be: it is tried again.
    """
    if isinstance(end, StreamClosed):
        return Stop()
    if isinstance(end, SessionRejected):
        return GiveUp(
            category=Category.INFRASTRUCTURE, public=f"the gateway rejected the supervisor's session: {end.reason}"
        )
    if isinstance(end, StreamLost) and end.status in _FINAL and not (renewed and _refuses_token(end)):
        missing = end.status is StatusCode.UNIMPLEMENTED
        return GiveUp(
            category=Category.INCOMPATIBLE if missing else Category.INFRASTRUCTURE,
            public=f"the gateway refused the supervisor's session with {end.status.name}",
            private=end.reason,
        )
    return Reconnect(
        pause_seconds=pause_after(max(attempt, 1), timing.first_backoff_seconds, timing.last_reconnect_seconds)
    )


def describe_end(end: SessionEnd) -> str:
    """Return how a session ended, for people."""
    match end:
        case StreamClosed():
            return "the gateway closed it"
        case GatewaySilent(seconds=seconds):
            return f"the gateway said nothing for {seconds:g} s"
        case StreamLost(reason=reason) | SessionRejected(reason=reason):
            return reason


class SupervisorSession:
    """Keeps one session with the gateway, and the readiness listener while it is accepted.

    Args:
        gateway: The gateway.
        sandbox_id: The sandbox.
        instance_id: UUID of this supervisor start.
        health_socket: Where readiness is served while the session is accepted.
        timing: Intervals and limits.
    """

    def __init__(
        self, gateway: Gateway, *, sandbox_id: str, instance_id: str, health_socket: Path | None, timing: Timing
    ) -> None:
        self._gateway = gateway
        self._sandbox_id = sandbox_id
        self._instance_id = instance_id
        self._health_socket = health_socket
        self._timing = timing
        self._epoch = 0
        self.ready = asyncio.Event()
        """Set once a first session was accepted."""

    async def run(self, *, renew: Callable[[], Awaitable[None]] | None = None) -> None:
        """Keep a session until the gateway ends it in order.

        Args:
            renew: Renews the tokens, for a gateway that refuses the present one.

        Raises:
            StageError: No session can be had any more, or the first one could not be had in time.
        """
        try:
            async with asyncio.timeout(self._timing.first_session_seconds) as limit:
                await self._keep(limit, renew)
        except TimeoutError as error:
            raise StageError(
                stage=Stage.READINESS,
                category=Category.INFRASTRUCTURE,
                public=f"the gateway at {self._gateway.address} accepted no session "
                f"within {self._timing.first_session_seconds:g} s",
                status=StatusCode.DEADLINE_EXCEEDED,
                retryable=True,
            ) from error

    async def _keep(self, limit: asyncio.Timeout, renew: Callable[[], Awaitable[None]] | None) -> None:
        attempt = 0
        # Once an outage: a gateway that refuses the renewed token too means it.
        left = renew
        while True:
            attempt += 1
            end, accepted = await self._one_session(limit)
            if accepted:
                attempt = 0
                left = left if _refuses_token(end) else renew
            renewed = False
            if left is not None and _refuses_token(end):
                renewal = await _renewal(left)
                renewed = renewal is not _Renewal.REFUSED
                left = left if renewal is _Renewal.UNANSWERED else None
            step = after_session(end, attempt=attempt, timing=self._timing, renewed=renewed)
            if isinstance(step, Stop):
                _log.info("the gateway ended the session in order")
                return
            if isinstance(step, GiveUp):
                raise StageError(
                    stage=Stage.RUNNING if self.ready.is_set() else Stage.READINESS,
                    category=step.category,
                    public=step.public,
                    private=step.private,
                    status=StatusCode.FAILED_PRECONDITION,
                )
            # One warning an outage: the attempts that follow say nothing new.
            level = logging.WARNING if attempt <= 1 else logging.DEBUG
            _log.log(level, "the session with the gateway ended: %s; reconnecting", describe_end(end))
            await asyncio.sleep(step.pause_seconds)

    async def _one_session(self, limit: asyncio.Timeout) -> tuple[SessionEnd, bool]:
        """Run one session; returns how it ended and whether it was ever accepted."""
        self._epoch += 1
        stream = self._gateway.connect_supervisor()
        accepted = False
        try:
            await stream.send(self._hello())
            first = await self._heard(stream, self._timing.heartbeat_seconds)
            if first is None:
                return StreamClosed(), False
            if first.WhichOneof("payload") == "session_rejected":
                return SessionRejected(reason=first.session_rejected.reason), False
            if first.WhichOneof("payload") != "session_accepted":
                return StreamLost(status=StatusCode.INTERNAL, reason="the first message was no answer to Hello"), False
            accepted = True
            # RuntimeError: the limit has just passed, and the cancellation that it sent is under way.
            with contextlib.suppress(RuntimeError):
                limit.reschedule(None)
            return await self._accepted(stream, first.session_accepted), True
        except GatewayError as error:
            return StreamLost(status=error.status, reason=error.reason), accepted
        finally:
            stream.cancel()

    async def _accepted(self, stream: SupervisorStream, answer: openshell_pb2.SessionAccepted) -> SessionEnd:
        named = answer.heartbeat_interval.ToTimedelta().total_seconds()
        interval = named if named > 0 else self._timing.heartbeat_seconds
        _log.info("session %s accepted; a heartbeat each %.3g s", answer.session_id, interval)
        beating = asyncio.create_task(_beat(stream, interval), name="heartbeats")
        try:
            async with readiness_listener(self._health_socket):
                if not self.ready.is_set():
                    self.ready.set()
                    say_ready()
                return await self._listen(stream, interval)
        except OSError as error:
            raise StageError(
                stage=Stage.READINESS,
                category=Category.INFRASTRUCTURE,
                public=f"readiness cannot be served at {self._health_socket}: {cause_of(error).lower()}",
            ) from error
        finally:
            beating.cancel()
            await asyncio.wait({beating})

    async def _listen(self, stream: SupervisorStream, interval: float) -> SessionEnd:
        while True:
            try:
                message = await self._heard(stream, interval)
            except GatewayError as error:
                if error.status is StatusCode.DEADLINE_EXCEEDED:
                    return GatewaySilent(seconds=MISSED_HEARTBEATS * interval)
                return StreamLost(status=error.status, reason=error.reason)
            if message is None:
                return StreamClosed()
            kind = message.WhichOneof("payload")
            if kind == "session_rejected":
                return SessionRejected(reason=message.session_rejected.reason)
            if kind == "relay_open":
                with contextlib.suppress(GatewayError):
                    await stream.send(_refused_relay(message.relay_open.channel_id))
            elif kind != "heartbeat":
                _log.warning("a message of the gateway has no effect in this supervisor: %s", kind)

    async def _heard(self, stream: SupervisorStream, interval: float) -> GatewayMessage | None:
        limit = MISSED_HEARTBEATS * interval
        try:
            async with asyncio.timeout(limit):
                return await stream.receive()
        except TimeoutError as error:
            raise GatewayError(
                f"the gateway said nothing for {limit:g} s",
                operation="ConnectSupervisor",
                detail="",
                status=StatusCode.DEADLINE_EXCEEDED,
            ) from error

    def _hello(self) -> openshell_pb2.SupervisorMessage:
        return openshell_pb2.SupervisorMessage(
            hello=openshell_pb2.SupervisorHello(
                sandbox_id=self._sandbox_id, instance_id=self._instance_id, connection_epoch=self._epoch
            )
        )


class _Renewal(Enum):
    """What came of a renewal."""

    DONE = "done"
    REFUSED = "refused"
    UNANSWERED = "unanswered"


async def _renewal(renew: Callable[[], Awaitable[None]]) -> _Renewal:
    try:
        await renew()
    except GatewayError as error:
        _log.warning("the tokens could not be renewed: %s", error.reason)
        return _Renewal.UNANSWERED if error.status in _UNANSWERED else _Renewal.REFUSED
    except IsolationError as error:
        # The session needs the gateway's token only; the renewal in time brings the boundary another one.
        _log.warning("the boundary did not take the renewed token: %s", error)
    return _Renewal.DONE


def _refuses_token(end: SessionEnd) -> bool:
    return isinstance(end, StreamLost) and end.status is StatusCode.UNAUTHENTICATED


async def _beat(stream: SupervisorStream, interval: float) -> None:
    beat = openshell_pb2.SupervisorMessage(heartbeat=openshell_pb2.SupervisorHeartbeat())
    # The reader tells how a stream ends; a failed write only means that it has.
    with contextlib.suppress(GatewayError):
        while True:
            await asyncio.sleep(interval)
            await stream.send(beat)


def _refused_relay(channel_id: str) -> openshell_pb2.SupervisorMessage:
    return openshell_pb2.SupervisorMessage(
        relay_open_result=openshell_pb2.RelayOpenResult(
            channel_id=channel_id, success=False, error="this supervisor does not serve relays"
        )
    )
