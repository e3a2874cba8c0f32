"""Why a container of a sandbox ended: the vocabulary that driver, gateway, supervisor and SDK share.

A driver judges an exit and writes the `Verdict` into the metadata of a platform event; a gateway carries that metadata
untouched; a client reads it back with `Verdict.from_metadata`. A supervisor writes its `LastWords` as the last line of
its standard error; the driver quotes the public half of them.

Standard library only, so that every process and every image can import it. Nothing here raises on data that a peer
sent: unknown values become ``unknown``, unreadable ones are absent.

Metadata of a verdict (all values are strings; a key whose fact is not known is left out):

=================================== ==============================================================================
Key                                 Value
=================================== ==============================================================================
``openshell.verdict.kind``          a `VerdictKind`; its presence says that the metadata holds a verdict
``openshell.verdict.reason``        the reason string of the sandbox's condition (compute-driver contract 4.4)
``openshell.verdict.component``     a `Component`: which of the two containers ended
``openshell.verdict.exit_code``     decimal exit code
``openshell.verdict.signal``        Linux signal name, for example ``SIGKILL``
``openshell.verdict.killed_by``     a `KilledBy`
``openshell.verdict.started_at``    ISO 8601 in UTC
``openshell.verdict.finished_at``   ISO 8601 in UTC
``openshell.verdict.memory_limit``  memory limit of the container in bytes, decimal
``openshell.verdict.engine_error``  the engine's own cause, when the process could not be run
``openshell.verdict.words``         the component's public last words
``openshell.verdict.stage``         a `Stage`: how far the supervisor had come
``openshell.verdict.category``      a `Category`: whose turn it is to act
``openshell.verdict.generation``    the launch generation of the container
=================================== ==============================================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Final, TypeVar

from openshell.last_words import MAX_WORDS_BYTES, Category, LastWords, Stage, clean_text

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "MAX_MESSAGE_BYTES",
    "MAX_WORDS_BYTES",
    "METADATA_PREFIX",
    "Category",
    "Component",
    "KilledBy",
    "LastWords",
    "Stage",
    "Verdict",
    "VerdictKind",
    "clean_text",
    "signal_name",
]

MAX_MESSAGE_BYTES: Final = 1024
"""Upper bound of a rendered message in UTF-8 bytes (compute-driver contract 0, point 10)."""

METADATA_PREFIX: Final = "openshell.verdict."
"""Every metadata key of a verdict starts with this."""

_NO_VIEW: Final = "InspectFailed"
"""Reason of what is no exit: the container could not be looked at, whatever else is told of it."""
_MAX_REASON_BYTES: Final = 128
_MAX_GENERATION_BYTES: Final = 128
_INTEGER: Final = re.compile(r"-?[0-9]{1,19}\Z", re.ASCII)
_SIGNAL: Final = re.compile(r"SIG[A-Z0-9+]{1,12}\Z", re.ASCII)

# Linux numbers, written out: the containers are Linux even where this module runs on another system.
_LINUX_SIGNALS: Final = tuple(
    re.findall(
        "[A-Z0-9]+",
        "HUP INT QUIT ILL TRAP ABRT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM STKFLT CHLD CONT STOP TSTP TTIN TTOU "
        "URG XCPU XFSZ VTALRM PROF WINCH IO PWR SYS",
    )
)


class VerdictKind(StrEnum):
    """What happened, finer than a condition's reason. Listed in the order in which they are decided."""

    STOPPED = "stopped"
    """The driver asked for it; not an error."""
    FOLLOWED_WORKLOAD = "followed_workload"
    """The workload ended first and the supervisor followed; no failure of its own."""
    REMOVED = "removed"
    """The container was removed by someone other than the driver."""
    COULD_NOT_RUN = "could_not_run"
    """The engine could not start the process: nothing of it ever ran."""
    OUT_OF_MEMORY = "out_of_memory"
    """The kernel killed it for exceeding its memory limit."""
    KILLED_THROUGH_ENGINE = "killed_through_engine"
    """Another client of the engine killed it."""
    SIGNALED = "signaled"
    """Its exit code is that of a death by signal; a program may also return such a number by itself."""
    EXITED_AFTER_OOM = "exited_after_oom"
    """It exited by itself after a process in it had been killed for lack of memory."""
    EXITED = "exited"
    """It exited by itself with a code other than zero."""
    ENDED_UNASKED = "ended_unasked"
    """It exited with code zero though nobody had asked it to end."""
    STILL_RUNNING = "still_running"
    """No exit: only the connection that watched it was lost."""
    ENGINE_UNREACHABLE = "engine_unreachable"
    """No exit is known: the engine does not answer, the last known state stands."""
    UNKNOWN = "unknown"
    """No rule fits, or a peer used a kind that this version does not know."""


class KilledBy(StrEnum):
    """Who ended the process."""

    DRIVER = "driver"
    ENGINE_CLIENT = "engine_client"
    """Somebody else through the engine, for example ``docker kill``."""
    KERNEL = "kernel"
    """The kernel's out-of-memory killer."""
    UNKNOWN = "unknown"
    """A signal whose sender cannot be known, for example ``kill`` on the host."""


class Component(StrEnum):
    """Which container of the sandbox a verdict is about."""

    SUPERVISOR = "supervisor"
    WORKLOAD = "workload"
    UNKNOWN = "unknown"


_Open = TypeVar("_Open", KilledBy, Component, VerdictKind)


def signal_name(number: int) -> str | None:
    """Return the Linux name of a signal, or None where the number has none.

    Args:
        number: Signal number, for example 9.
    """
    return f"SIG{_LINUX_SIGNALS[number - 1]}" if 1 <= number <= len(_LINUX_SIGNALS) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why a container ended, with every fact that is known about it.

    Texts are cleaned and bounded on construction, times are in UTC, impossible numbers are absent, so that any verdict
    can be sent and `from_metadata` of `to_metadata` is the same verdict.
    """

    kind: VerdictKind
    """What happened."""
    reason: str
    """Reason string of the condition on the wire, for example ``ControlSupervisorExited`` (contract 4.4)."""
    component: Component
    """Which container ended."""
    exit_code: int | None = None
    """Exit code as the engine reported it; None where it is not known."""
    signal: str | None = None
    """Linux name of the signal, for example ``SIGKILL``; None where no signal applies."""
    killed_by: KilledBy | None = None
    """Who ended it; None where nobody did."""
    started_at: datetime | None = None
    """When the process started, in UTC."""
    finished_at: datetime | None = None
    """When it ended, in UTC."""
    memory_limit_bytes: int | None = None
    """Memory limit of the container; None where it has none or it is not known."""
    engine_error: str = ""
    """The engine's own cause, cut to what matters; at most 512 bytes."""
    words: str = ""
    """Public last words of the component; at most 512 bytes."""
    stage: Stage | None = None
    """How far the supervisor had come, by its own words."""
    category: Category | None = None
    """What kind of cause it was, by its own words."""
    generation: str = ""
    """Launch generation of the container; empty where it is not known."""

    def __post_init__(self) -> None:
        bounds = {
            "reason": _MAX_REASON_BYTES,
            "engine_error": MAX_WORDS_BYTES,
            "words": MAX_WORDS_BYTES,
            "generation": _MAX_GENERATION_BYTES,
        }
        for name, max_bytes in bounds.items():
            object.__setattr__(self, name, clean_text(getattr(self, name), max_bytes=max_bytes))
        object.__setattr__(self, "started_at", _in_utc(self.started_at))
        object.__setattr__(self, "finished_at", _in_utc(self.finished_at))
        if self.exit_code is not None and not -(2**31) <= self.exit_code < 2**32:
            object.__setattr__(self, "exit_code", None)
        if self.memory_limit_bytes is not None and not 0 < self.memory_limit_bytes < 2**63:
            object.__setattr__(self, "memory_limit_bytes", None)
        if self.signal is not None and not _SIGNAL.match(self.signal):
            object.__setattr__(self, "signal", None)

    @property
    def is_exit(self) -> bool:
        """Whether the container is known to have ended (false where only the view of it was lost)."""
        return self.kind not in {VerdictKind.STILL_RUNNING, VerdictKind.ENGINE_UNREACHABLE} and self.reason != _NO_VIEW

    @property
    def is_failure(self) -> bool:
        """Whether this exit is a failure of the component, to be reported as such."""
        expected = {VerdictKind.STOPPED, VerdictKind.FOLLOWED_WORKLOAD}
        return self.is_exit and self.kind not in expected and not self.is_completion

    @property
    def is_completion(self) -> bool:
        """Whether this is the end of a workload whose main process had done its work: it exited with 0 by itself."""
        return self.kind is VerdictKind.ENDED_UNASKED and self.component is Component.WORKLOAD

    @property
    def message(self) -> str:
        """One sentence for people: never empty, never ending in a colon, at most 1 KiB, without control characters.

        Names the exit code and the signal wherever they are known, then the time, then the engine's cause or the
        component's last words.
        """
        sentence = _COMPLETED if self.is_completion else _SENTENCES[self.kind]
        if self.kind is VerdictKind.UNKNOWN and not self.is_exit:
            sentence = _NOT_SEEN
        text = sentence.format(who=_SUBJECTS[self.component], **self._facts())
        if self.finished_at is not None and self.is_exit:
            text += f" at {self.finished_at:%Y-%m-%dT%H:%M:%SZ}"
        if self.engine_error:
            text += f"; the engine says: {_without_end(self.engine_error)}"
        if self.words:
            told = ", ".join(part.value for part in (self.stage, self.category) if part is not None)
            text += f"; last words{f' ({told})' if told else ''}: {self.words}"
        return _without_end(clean_text(text, max_bytes=MAX_MESSAGE_BYTES))

    def _facts(self) -> dict[str, str]:
        code = "exit code unknown" if self.exit_code is None else f"exit code {self.exit_code}"
        if self.signal is not None:
            code += f", {self.signal}"
        limit = f"memory limit {_size(self.memory_limit_bytes)}" if self.memory_limit_bytes else "no memory limit known"
        number = "an unknown code" if self.exit_code is None else f"code {self.exit_code}"
        if self.killed_by is KilledBy.ENGINE_CLIENT:
            hint = "sent through the engine by someone other than the driver"
        elif self.signal == "SIGKILL":
            hint = "sender unknown, lack of memory is possible"
        else:
            hint = "a program may also return that number"
        return {
            "code": code,
            "number": number,
            "limit": limit,
            "signal": self.signal or "a signal",
            "hint": hint,
            "lead": "main process" if self.component is Component.WORKLOAD else "workload",
            # The engine gives these codes for other errors too, and then says in its own words which.
            "could_not": "" if self.engine_error else _COULD_NOT_RUN.get(self.exit_code or 0, ""),
        }

    def to_metadata(self) -> dict[str, str]:
        """Return the verdict as metadata of a platform event (keys: see the module). Unknown facts are left out."""
        values = {
            "kind": self.kind.value,
            "reason": self.reason,
            "component": self.component.value,
            "exit_code": "" if self.exit_code is None else str(self.exit_code),
            "signal": self.signal or "",
            "killed_by": self.killed_by or "",
            "started_at": self.started_at.isoformat() if self.started_at else "",
            "finished_at": self.finished_at.isoformat() if self.finished_at else "",
            "memory_limit": "" if self.memory_limit_bytes is None else str(self.memory_limit_bytes),
            "engine_error": self.engine_error,
            "words": self.words,
            "stage": self.stage or "",
            "category": self.category or "",
            "generation": self.generation,
        }
        return {METADATA_PREFIX + name: str(value) for name, value in values.items() if value}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> Verdict | None:
        """Read a verdict from the metadata of a platform event.

        Args:
            metadata: Metadata from a peer; other keys are ignored.

        Returns:
            The verdict, or None where the metadata holds none. Values that this version does not know become
            ``unknown``; values that cannot be read are absent.
        """

        def text(name: str) -> str:
            # A peer's mapping may hold anything, whatever its declared type says.
            value: object = metadata.get(METADATA_PREFIX + name)
            return value if isinstance(value, str) else ""

        if not text("kind"):
            return None
        return cls(
            kind=_member(VerdictKind, text("kind")),
            reason=text("reason"),
            component=_member(Component, text("component")),
            exit_code=_integer(text("exit_code")),
            signal=text("signal") or None,
            killed_by=_member(KilledBy, text("killed_by")) if text("killed_by") else None,
            started_at=_time(text("started_at")),
            finished_at=_time(text("finished_at")),
            memory_limit_bytes=_integer(text("memory_limit")),
            engine_error=text("engine_error"),
            words=text("words"),
            stage=Stage.read(text("stage")) if text("stage") else None,
            category=Category.read(text("category")) if text("category") else None,
            generation=text("generation"),
        )


_SUBJECTS: Final[dict[Component, str]] = {
    Component.SUPERVISOR: "control supervisor",
    Component.WORKLOAD: "workload container",
    Component.UNKNOWN: "container",
}

_NOT_SEEN: Final = "{who} could not be looked at, and is not known to have ended"
_SENTENCES: Final[dict[VerdictKind, str]] = {
    VerdictKind.STOPPED: "{who} was stopped on request ({code})",
    VerdictKind.FOLLOWED_WORKLOAD: "{who} ended because the {lead} had ended ({code})",
    VerdictKind.REMOVED: "{who} was removed from the engine by someone other than the driver ({code})",
    VerdictKind.COULD_NOT_RUN: "{who} could not run{could_not} ({code})",
    VerdictKind.OUT_OF_MEMORY: "{who} ran out of memory and was killed by the kernel ({code}, {limit})",
    VerdictKind.KILLED_THROUGH_ENGINE: "{who} was killed through the engine by someone other than the driver ({code})",
    VerdictKind.SIGNALED: "{who} exited with {number}, which usually means that it was killed by {signal} ({hint})",
    VerdictKind.EXITED_AFTER_OOM: "{who} exited with {number} after a process in it was killed for lack of memory "
    "({limit})",
    VerdictKind.EXITED: "{who} exited with {number}",
    VerdictKind.ENDED_UNASKED: "{who} exited with {number} though nothing had asked it to end",
    VerdictKind.STILL_RUNNING: "{who} is still running; only the connection that watched it was lost",
    VerdictKind.ENGINE_UNREACHABLE: "the container engine does not answer; the last known state of the {who} stands",
    VerdictKind.UNKNOWN: "{who} ended for a reason that could not be determined ({code})",
}
_COMPLETED: Final = "{who} completed with {number}"

_COULD_NOT_RUN: Final[dict[int, str]] = {
    126: ": its command is not executable",
    127: ": its command was not found",
}


def _member(kind: type[_Open], text: str) -> _Open:
    try:
        return kind(text)
    except ValueError:
        return kind("unknown")


def _integer(text: str) -> int | None:
    return int(text) if _INTEGER.match(text) else None


def _time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _in_utc(moment: datetime | None) -> datetime | None:
    if moment is None:
        return None
    if moment.tzinfo is None:
        return moment.replace(tzinfo=UTC)
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        return None


def _size(size_bytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor and size_bytes % factor == 0:
            return f"{size_bytes // factor} {unit}"
    return f"{size_bytes} bytes"


def _without_end(text: str) -> str:
    return text.rstrip(" :;,")
