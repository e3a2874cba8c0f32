"""The supervisors that are connected right now: one session a sandbox, kept alive by heartbeats."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from enum import Enum, auto

HEARTBEAT_INTERVAL_SECONDS = 10.0
"""How often each side says that it lives."""

MISSED_HEARTBEATS = 3
"""Intervals without any message after which a session ends."""


class SessionEnd(Enum):
    """Why the gateway ended a session; decides the status that the supervisor sees."""

    SHUTDOWN = auto()
    """The gateway stops: UNAVAILABLE, the supervisor connects again."""
    STOPPED = auto()
    """The sandbox was stopped or deleted: OK, the supervisor exits."""
    SUPERSEDED = auto()
    """Another supervisor instance connected for the same sandbox: ABORTED."""
    SILENT = auto()
    """Too many heartbeats were missed: UNAVAILABLE."""


@dataclass(eq=False, slots=True, kw_only=True)
class Session:
    """One connected supervisor."""

    sandbox_id: str
    instance_id: str
    session_id: str
    ended: asyncio.Future[SessionEnd] = field(repr=False)

    def end(self, why: SessionEnd) -> None:
        """Ask the stream that carries this session to end."""
        if not self.ended.done():
            self.ended.set_result(why)


class SessionRegistry:
    """Who is connected. A newer session of the same sandbox takes the older one's place."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._closing = False

    def open(self, sandbox_id: str, instance_id: str) -> Session:
        """Register a session; an older one of the same sandbox is ended."""
        session = Session(
            sandbox_id=sandbox_id,
            instance_id=instance_id,
            session_id=str(uuid.uuid4()),
            ended=asyncio.get_running_loop().create_future(),
        )
        older = self._sessions.get(sandbox_id)
        if older is not None:
            older.end(SessionEnd.SUPERSEDED)
        self._sessions[sandbox_id] = session
        if self._closing:
            session.end(SessionEnd.SHUTDOWN)
        return session

    def close(self, session: Session) -> bool:
        """Forget a session whose stream is over; false when a newer one has taken its place."""
        if self._sessions.get(session.sandbox_id) is not session:
            return False
        del self._sessions[session.sandbox_id]
        return True

    def get(self, sandbox_id: str) -> Session | None:
        """The session of that sandbox."""
        return self._sessions.get(sandbox_id)

    def end(self, sandbox_id: str, why: SessionEnd) -> None:
        """End the session of a sandbox, if there is one."""
        session = self._sessions.get(sandbox_id)
        if session is not None:
            session.end(why)

    def end_all(self, why: SessionEnd) -> None:
        """End every session, and those that still arrive."""
        self._closing = True
        for session in tuple(self._sessions.values()):
            session.end(why)
