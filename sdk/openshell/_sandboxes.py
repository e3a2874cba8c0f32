"""Sandboxes of a gateway, synchronously."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from openshell._calls import deadline_of
from openshell._progress import Goal, Progress, describe, phase_of, progress, ready_condition
from openshell._sandbox_requests import (
    MAX_INT32,
    checked_count,
    create_request,
    every_workspace,
    scope_of,
    watch_request,
)
from openshell._watch import SandboxWatch, WatchEvent
from openshell.errors import (
    InvalidArgumentError,
    MalformedResponseError,
    NotFoundError,
    RpcError,
    SandboxFailedError,
    WaitTimeoutError,
)
from openshell.status import StatusCode
from openshell.v1 import (
    DeleteSandboxRequest,
    DeleteSandboxResponse,
    GetSandboxRequest,
    ListSandboxesRequest,
    ListSandboxesResponse,
    Sandbox,
    SandboxResponse,
    SandboxRestartPolicy,
    SandboxStreamEvent,
)
from openshell.verdicts import Component, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from openshell._calls import Connection
    from openshell.sandbox.v1 import SandboxPolicy

EVENT_TAIL = 64
"""How many past events are read to find the last exit of a supervisor."""

_MAX_PAGES = 10_000
_REOPEN_PAUSE_SECONDS = 0.5
_LEAST_LOOK_SECONDS = 0.25
_LEAST_CALL_SECONDS = 2.0
"""What the one look at the state may take, also where time is up."""


@dataclass(slots=True, kw_only=True)
class _Seen:
    """What a wait has learnt so far, over reopened streams."""

    sandbox: Sandbox | None = None
    verdict: Verdict | None = None
    cursor: str = ""

    def note(self, event: WatchEvent) -> None:
        self.cursor = event.cursor or self.cursor
        self.sandbox = event.sandbox or self.sandbox
        if event.verdict is not None and event.verdict.component is Component.SUPERVISOR:
            self.verdict = event.verdict


class Sandboxes:
    """Create, read, watch and delete sandboxes. Reached as ``OpenShell().sandboxes``."""

    def __init__(self, connection: Connection, *, workspace: str) -> None:
        """Use a connection; ``workspace`` is where names are looked up unless a call says otherwise."""
        self._connection = connection
        self._workspace = workspace

    def create(
        self,
        name: str = "",
        *,
        image: str = "",
        command: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        cpu_limit: str = "",
        memory_limit: str = "",
        policy: SandboxPolicy | None = None,
        tty: bool = False,
        log_level: str = "",
        restart_policy: SandboxRestartPolicy = SandboxRestartPolicy.UNSPECIFIED,
        driver_config: Mapping[str, object] | None = None,
        request_id: str = "",
        workspace: str | None = None,
        timeout_seconds: float | None = None,
    ) -> Sandbox:
        """Ask for a sandbox. It is returned as soon as the gateway accepted it; use `wait` for readiness.

        Args:
            name: Name in the workspace; empty lets the gateway choose.
            image: Container image of the workload; empty takes the driver's default.
            command: Argument vector of the main process; empty takes the login shell.
            environment: Variables of the main process.
            labels: Labels of the sandbox, for `list`.
            annotations: Annotations of the sandbox.
            cpu_limit: Kubernetes quantity, for example ``500m``.
            memory_limit: Kubernetes quantity, for example ``256Mi``.
            policy: What the agent may do; None lets the gateway choose.
            tty: Whether the main process gets a terminal.
            log_level: Level of supervisor and runtime; empty takes the driver's default.
            restart_policy: What follows when the main process ends.
            driver_config: Options for the compute driver, under its configured name.
            request_id: UUID that makes a repeated call safe; the same request must carry the same one.
            workspace: Workspace of the sandbox; None takes the client's.
            timeout_seconds: Deadline of the call; None takes the client's default.

        Raises:
            AlreadyExistsError: The workspace has a sandbox of that name.
            RequestRefusedError: The gateway or the driver cannot accept the request as it stands.
            InvalidArgumentError: A value cannot be sent.
            RpcError: Any other failure of the call.
        """
        request = create_request(
            name=name,
            workspace=self._scope(workspace),
            image=image,
            command=command,
            environment=environment,
            labels=labels,
            annotations=annotations,
            cpu_limit=cpu_limit,
            memory_limit=memory_limit,
            policy=policy,
            tty=tty,
            log_level=log_level,
            restart_policy=restart_policy,
            driver_config=driver_config,
            request_id=request_id,
        )
        answer = self._connection.unary("CreateSandbox", request, SandboxResponse, timeout_seconds=timeout_seconds)
        return _present(answer, "CreateSandbox")

    def get(self, name: str, *, workspace: str | None = None, timeout_seconds: float | None = None) -> Sandbox:
        """The present state of a sandbox.

        Raises:
            NotFoundError: The workspace has no sandbox of that name.
            RpcError: Any other failure of the call.
        """
        request = GetSandboxRequest(name=_named(name), workspace_scope=scope_of(self._scope(workspace)))
        answer = self._connection.unary("GetSandbox", request, SandboxResponse, timeout_seconds=timeout_seconds)
        return _present(answer, "GetSandbox")

    def list(
        self,
        *,
        label_selector: str = "",
        workspace: str | None = None,
        all_workspaces: bool = False,
        page_size: int = 100,
        timeout_seconds: float | None = None,
    ) -> Iterator[Sandbox]:
        """Yield every sandbox, page by page.

        Args:
            label_selector: For example ``team=red``; empty selects all.
            workspace: Where to look; None takes the client's.
            all_workspaces: Look everywhere instead.
            page_size: Sandboxes to fetch at once.
            timeout_seconds: Deadline of each page's call.

        Raises:
            RpcError: A page could not be read; what was yielded before stays valid.
        """
        page_size = checked_count(page_size, "page_size", most=MAX_INT32)
        scope = every_workspace() if all_workspaces else scope_of(self._scope(workspace))
        token, seen = "", set[str]()
        while True:
            request = ListSandboxesRequest(
                page_size=page_size, page_token=token, label_selector=label_selector, workspace_scope=scope
            )
            page = self._connection.unary(
                "ListSandboxes", request, ListSandboxesResponse, timeout_seconds=timeout_seconds
            )
            yield from page.sandboxes
            token = page.next_page_token
            if not token:
                return
            if token in seen or len(seen) >= _MAX_PAGES:
                raise MalformedResponseError("ListSandboxes", "page token that moves on", len(token))
            seen.add(token)

    def delete(
        self,
        name: str,
        *,
        allow_missing: bool = False,
        workspace: str | None = None,
        timeout_seconds: float | None = None,
    ) -> DeleteSandboxResponse:
        """Ask for a sandbox's removal; `wait` with `Goal.DELETED` tells when it is gone.

        Raises:
            NotFoundError: There is no such sandbox and ``allow_missing`` is false.
            RpcError: Any other failure of the call.
        """
        request = DeleteSandboxRequest(
            name=_named(name), workspace_scope=scope_of(self._scope(workspace)), allow_missing=allow_missing
        )
        return self._connection.unary("DeleteSandbox", request, DeleteSandboxResponse, timeout_seconds=timeout_seconds)

    def watch(
        self,
        name: str,
        *,
        status: bool = True,
        events: bool = True,
        event_tail: int = 0,
        stop_on_terminal: bool = False,
        resume_after: str = "",
        workspace: str | None = None,
        timeout_seconds: float | None = None,
    ) -> SandboxWatch:
        """Open the stream of a sandbox: its state first, then every change.

        Args:
            name: The sandbox.
            status: Follow its state.
            events: Follow platform events.
            event_tail: How many past events to replay first.
            stop_on_terminal: End the stream once the sandbox can change no more by itself.
            resume_after: Cursor of the last event that was processed.
            workspace: Where the name is looked up; None takes the client's.
            timeout_seconds: End the stream after this time; None keeps it open.
        """
        request = watch_request(
            name=_named(name),
            workspace=self._scope(workspace),
            status=status,
            events=events,
            event_tail=event_tail,
            stop_on_terminal=stop_on_terminal,
            cursor=resume_after,
        )
        return SandboxWatch(
            self._connection.stream("WatchSandbox", request, SandboxStreamEvent, timeout_seconds=timeout_seconds)
        )

    def last_supervisor_exit(
        self, name: str, *, workspace: str | None = None, timeout_seconds: float | None = None
    ) -> Verdict | None:
        """Why the sandbox's supervisor last ended, or None when the gateway remembers no such event.

        Raises:
            NotFoundError: The workspace has no sandbox of that name.
            RpcError: Any other failure of the call.
        """
        found: Verdict | None = None
        past = self.watch(
            name,
            status=False,
            events=False,
            event_tail=EVENT_TAIL,
            workspace=workspace,
            timeout_seconds=timeout_seconds or 10.0,
        )
        with past:
            for event in past:
                if event.verdict is not None and event.verdict.component is Component.SUPERVISOR:
                    found = event.verdict
        return found

    def wait(
        self,
        name: str,
        goal: Goal = Goal.READY,
        *,
        timeout_seconds: float = 300.0,
        on_event: Callable[[WatchEvent], None] | None = None,
        workspace: str | None = None,
    ) -> Sandbox | None:
        """Wait until a sandbox is where you want it. The state is looked at least once, also with a timeout of 0.

        Args:
            name: The sandbox.
            goal: What to wait for.
            timeout_seconds: How long at most.
            on_event: Called with every event, for example to show progress.
            workspace: Where the name is looked up; None takes the client's.

        Returns:
            The sandbox as it is then; None when it was awaited to be deleted.

        Raises:
            SandboxFailedError: The goal cannot be reached from the state the sandbox is in.
            WaitTimeoutError: Time is up; the text holds the last known state, or why it could not be read.
            InvalidArgumentError: The timeout is not a number.
            NotFoundError: There is no such sandbox.
            RpcError: The gateway refused to tell.
        """
        deadline_of(timeout_seconds)  # refuses NaN, with which no time would ever be up
        deadline = time.monotonic() + timeout_seconds
        seen = _Seen()
        problem: RpcError | None = None
        while True:
            try:
                if seen.sandbox is None:
                    look = max(deadline - time.monotonic(), _LEAST_CALL_SECONDS)
                    seen.sandbox = self.get(
                        name, workspace=workspace, timeout_seconds=min(look, self._connection.timeout_seconds)
                    )
                    if progress(goal, phase_of(seen.sandbox)) is Progress.REACHED:
                        return seen.sandbox
                with self.watch(
                    name,
                    event_tail=EVENT_TAIL,
                    resume_after=seen.cursor,
                    workspace=workspace,
                    timeout_seconds=max(deadline - time.monotonic(), _LEAST_LOOK_SECONDS),
                ) as stream:
                    for event in stream:
                        seen.note(event)
                        if on_event is not None:
                            on_event(event)
                        if event.sandbox is None:
                            continue
                        match progress(goal, phase_of(event.sandbox)):
                            case Progress.REACHED:
                                return event.sandbox
                            case Progress.IMPOSSIBLE:
                                raise self._failed(name, event.sandbox, goal, seen.verdict, workspace)
                            case Progress.PENDING:
                                pass
            except NotFoundError:
                if goal is Goal.DELETED:
                    return None
                raise
            except RpcError as error:
                if error.status is StatusCode.OUT_OF_RANGE:
                    seen.cursor = ""
                elif not error.retryable:
                    raise
                problem = error
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                unknown = "its state is not known" if problem is None else f"its state is not known, since {problem}"
                state = unknown if seen.sandbox is None else _summary(seen.sandbox)
                text = f"sandbox {name!r} is not {goal.value} after {timeout_seconds:g} s: {state}"
                raise WaitTimeoutError(text, sandbox=seen.sandbox) from problem
            time.sleep(min(_REOPEN_PAUSE_SECONDS, remaining))

    def _failed(
        self, name: str, sandbox: Sandbox, goal: Goal, verdict: Verdict | None, workspace: str | None
    ) -> SandboxFailedError:
        if verdict is None:
            try:
                verdict = self.last_supervisor_exit(name, workspace=workspace)
            except RpcError:
                verdict = None  # the condition still says what happened
        text = f"sandbox {name!r} cannot become {goal.value}: {_summary(sandbox)}"
        return SandboxFailedError(text, sandbox=sandbox, last_supervisor_exit=verdict)

    def _scope(self, workspace: str | None) -> str:
        return self._workspace if workspace is None else workspace


def _named(name: str) -> str:
    if not name:
        raise InvalidArgumentError("a sandbox name must not be empty")
    return name


def _present(answer: SandboxResponse, source: str) -> Sandbox:
    if answer.sandbox is None:
        raise MalformedResponseError(source, "SandboxResponse with a sandbox", 0)
    return answer.sandbox


def _summary(sandbox: Sandbox) -> str:
    phase = str(phase_of(sandbox)).capitalize()
    condition = ready_condition(sandbox)
    return f"phase {phase}" if condition is None else f"phase {phase}, {describe(condition)}"
