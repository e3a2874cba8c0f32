from __future__ import annotations

import unicodedata
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_docker.engine_objects import ContainerFacts, ContainerStatus, EngineEvent, HealthStatus
from driver_docker.verdict import ExitEvidence, Reason, could_not_run_code, engine_cause, judge
from openshell.verdicts import Category, Component, KilledBy, LastWords, Stage, Verdict, VerdictKind

STARTED = datetime(2026, 10, 5, 12, 0, 0, tzinfo=UTC)
FINISHED = STARTED + timedelta(seconds=42)
DIED = STARTED + timedelta(seconds=43)
LIMIT_BYTES = 64 * 2**20

NOT_FOUND = (
    "OCI runtime create failed: container_linux.go:380: starting container process caused: "
    'exec: "/nope": stat /nope: no such file or directory: unknown'
)
NOT_EXECUTABLE = (
    "failed to create task for container: failed to create shim task: OCI runtime create failed: runc create failed: "
    'unable to start container process: error during container init: exec: "/etc/passwd": permission denied: unknown'
)


def facts(
    status: ContainerStatus = ContainerStatus.EXITED,
    *,
    exit_code: int | None = 0,
    oom_killed: bool = False,
    error: str = "",
    started_at: datetime | None = STARTED,
    finished_at: datetime | None = FINISHED,
    memory_limit_bytes: int | None = None,
) -> ContainerFacts:
    return ContainerFacts(
        container_id="c" * 64,
        name="openshell-w--n-id-supervisor",
        image_id="sha256:0",
        labels={},
        status=status,
        exit_code=exit_code,
        oom_killed=oom_killed,
        error=error,
        created_at=STARTED,
        started_at=started_at,
        finished_at=finished_at,
        network_mode="host",
        networks=(),
        health=HealthStatus.NONE,
        memory_limit_bytes=memory_limit_bytes,
        tty=False,
    )


def running(status: ContainerStatus = ContainerStatus.RUNNING) -> ContainerFacts:
    return facts(status, exit_code=0, finished_at=None)


def created(*, error: str = "", exit_code: int = 0) -> ContainerFacts:
    return facts(ContainerStatus.CREATED, exit_code=exit_code, error=error, started_at=None, finished_at=None)


def event(action: str, **attributes: str) -> EngineEvent:
    return EngineEvent(kind="container", action=action, object_id="c" * 64, attributes=attributes, time=DIED)


KILL = event("kill", signal="9")
TERM = event("kill", signal="15")
OOM = event("oom")


def die(code: int | None) -> EngineEvent:
    return event("die", **({} if code is None else {"exitCode": str(code)}))


def supervisor(**seen: object) -> ExitEvidence:
    return ExitEvidence(**{"component": Component.SUPERVISOR, "ready_before": True, **seen})  # type: ignore[arg-type]


def workload(**seen: object) -> ExitEvidence:
    return ExitEvidence(**{"component": Component.WORKLOAD, "ready_before": True, **seen})  # type: ignore[arg-type]


K = VerdictKind

ROWS = [
    # Row 1: the driver asked for it, whatever else is seen.
    ("asked, 143", supervisor(stop_requested=True, facts=facts(exit_code=143)), K.STOPPED, 143, "SIGTERM"),
    ("asked, 137", supervisor(stop_requested=True, facts=facts(exit_code=137)), K.STOPPED, 137, "SIGKILL"),
    ("asked, OOM", supervisor(stop_requested=True, facts=facts(exit_code=137, oom_killed=True)), K.STOPPED, 137, "*"),
    ("asked, gone", supervisor(stop_requested=True), K.STOPPED, None, None),
    ("asked, failed", supervisor(stop_requested=True, facts=facts(exit_code=1)), K.STOPPED, 1, None),
    # Row 2: the workload led.
    (
        "workload first, 1",
        supervisor(workload_ended_first=True, facts=facts(exit_code=1)),
        K.FOLLOWED_WORKLOAD,
        1,
        None,
    ),
    ("workload first", supervisor(workload_ended_first=True, facts=facts()), K.FOLLOWED_WORKLOAD, 0, None),
    ("followed, gone", supervisor(workload_ended_first=True, absent=True), K.FOLLOWED_WORKLOAD, None, None),
    # Row 3: removed by somebody else.
    ("absent", supervisor(absent=True), K.REMOVED, None, None),
    ("rm -f", supervisor(absent=True, events=(KILL, die(137), event("destroy"))), K.REMOVED, 137, "SIGKILL"),
    (
        "rm -f, not gone yet",
        workload(facts=facts(ContainerStatus.REMOVING, exit_code=137), events=(KILL, die(137))),
        K.REMOVED,
        137,
        "SIGKILL",
    ),
    ("rm after exit", supervisor(absent=True, events=(die(3),)), K.REMOVED, 3, None),
    ("destroy, stale inspect", supervisor(facts=facts(exit_code=3), events=(event("destroy"),)), K.REMOVED, 3, None),
    # Row 4: never ran.
    ("created, error, 127", supervisor(facts=created(error=NOT_FOUND, exit_code=127)), K.COULD_NOT_RUN, 127, None),
    ("created, error, 128", supervisor(facts=created(error=NOT_FOUND, exit_code=128)), K.COULD_NOT_RUN, 127, None),
    ("created, error, 0", supervisor(facts=created(error=NOT_EXECUTABLE)), K.COULD_NOT_RUN, 126, None),
    ("start refused", supervisor(start_error=NOT_EXECUTABLE), K.COULD_NOT_RUN, 126, None),
    (
        "start refused, port",
        supervisor(start_error="address already in use", facts=created()),
        K.COULD_NOT_RUN,
        128,
        None,
    ),
    ("created, nothing said", supervisor(facts=created()), K.COULD_NOT_RUN, 128, None),
    ("restart refused", supervisor(facts=facts(exit_code=127, error=NOT_FOUND)), K.COULD_NOT_RUN, 127, None),
    ("start refused with die", supervisor(start_error=NOT_FOUND, events=(die(127),)), K.COULD_NOT_RUN, 127, None),
    # Near misses of row 4: it ran and returned that number itself.
    ("ran, 127", supervisor(facts=facts(exit_code=127)), K.EXITED, 127, None),
    ("ran, 126, start answer lost", supervisor(facts=facts(exit_code=126), start_error="x: y"), K.EXITED, 126, None),
    ("ran, 128", supervisor(facts=facts(exit_code=128)), K.EXITED, 128, None),
    # Row 5: the flag and 137.
    ("OOM 137", supervisor(facts=facts(exit_code=137, oom_killed=True)), K.OUT_OF_MEMORY, 137, "SIGKILL"),
    (
        "OOM 137 beats a kill",
        supervisor(facts=facts(exit_code=137, oom_killed=True), events=(KILL, die(137))),
        K.OUT_OF_MEMORY,
        137,
        "SIGKILL",
    ),
    ("OOM event, no inspect", supervisor(events=(OOM, die(137))), K.OUT_OF_MEMORY, 137, "SIGKILL"),
    # Row 6: killed through the engine.
    ("docker kill", supervisor(facts=facts(exit_code=137), events=(KILL, die(137))), K.KILLED_THROUGH_ENGINE, 137, "*"),
    ("docker kill, no inspect", supervisor(events=(KILL, die(137))), K.KILLED_THROUGH_ENGINE, 137, "SIGKILL"),
    (
        "kill named in words",
        supervisor(facts=facts(exit_code=137), events=(event("kill", signal="SIGKILL"),)),
        K.KILLED_THROUGH_ENGINE,
        137,
        "SIGKILL",
    ),
    # Near misses of rows 5 and 6: a SIGKILL of unknown origin.
    ("137 alone", supervisor(facts=facts(exit_code=137)), K.SIGNALED, 137, "SIGKILL"),
    ("137 after another signal", supervisor(facts=facts(exit_code=137), events=(TERM,)), K.SIGNALED, 137, "SIGKILL"),
    (
        "the flag says no, an event of a child says oom",
        supervisor(facts=facts(exit_code=137), events=(OOM, die(137))),
        K.SIGNALED,
        137,
        "SIGKILL",
    ),
    # Row 7: signals.
    ("143", supervisor(facts=facts(exit_code=143)), K.SIGNALED, 143, "SIGTERM"),
    ("139", supervisor(facts=facts(exit_code=139)), K.SIGNALED, 139, "SIGSEGV"),
    ("129", supervisor(facts=facts(exit_code=129)), K.SIGNALED, 129, "SIGHUP"),
    ("159", supervisor(facts=facts(exit_code=159)), K.SIGNALED, 159, "SIGSYS"),
    ("160 is no signal", supervisor(facts=facts(exit_code=160)), K.EXITED, 160, None),
    ("255 is no signal", supervisor(facts=facts(exit_code=255)), K.EXITED, 255, None),
    # Row 8: a child was the victim.
    ("OOM 0", supervisor(facts=facts(exit_code=0, oom_killed=True)), K.EXITED_AFTER_OOM, 0, None),
    ("OOM 1", supervisor(facts=facts(exit_code=1, oom_killed=True)), K.EXITED_AFTER_OOM, 1, None),
    # Rows 9 and 10.
    ("3", supervisor(facts=facts(exit_code=3)), K.EXITED, 3, None),
    ("78", supervisor(facts=facts(exit_code=78)), K.EXITED, 78, None),
    ("0", supervisor(facts=facts(exit_code=0)), K.ENDED_UNASKED, 0, None),
    ("die 0, no inspect", supervisor(events=(die(0),)), K.ENDED_UNASKED, 0, None),
    ("die 3, no inspect", supervisor(events=(die(3),)), K.EXITED, 3, None),
    ("die beats a later run", supervisor(facts=running(), events=(die(3),)), K.EXITED, 3, None),
    ("dead", supervisor(facts=facts(ContainerStatus.DEAD, exit_code=2)), K.EXITED, 2, None),
    # Rows 11 and 12: no exit.
    ("running", supervisor(facts=running()), K.STILL_RUNNING, None, None),
    ("running, stop asked", supervisor(facts=running(), stop_requested=True), K.STILL_RUNNING, None, None),
    ("paused", supervisor(facts=running(ContainerStatus.PAUSED)), K.STILL_RUNNING, None, None),
    ("running, start answer lost", supervisor(facts=running(), start_error="timeout"), K.STILL_RUNNING, None, None),
    ("unreachable", supervisor(engine_reachable=False), K.ENGINE_UNREACHABLE, None, None),
    ("unreachable, asked", supervisor(engine_reachable=False, stop_requested=True), K.ENGINE_UNREACHABLE, None, None),
    ("unreachable, died", supervisor(engine_reachable=False, events=(die(3),)), K.EXITED, 3, None),
    # Row 13.
    ("no code", supervisor(facts=facts(exit_code=None)), K.UNKNOWN, None, None),
    ("die without a code", supervisor(events=(die(None),)), K.UNKNOWN, None, None),
    ("0 but never started", supervisor(facts=facts(exit_code=0, started_at=None)), K.UNKNOWN, 0, None),
    ("OOM without a code", supervisor(facts=facts(exit_code=None, oom_killed=True)), K.UNKNOWN, None, None),
    ("nothing", supervisor(), K.UNKNOWN, None, None),
]


@pytest.mark.parametrize(
    ("evidence", "kind", "code", "signal"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_the_first_row_that_fits_wins(
    evidence: ExitEvidence, kind: VerdictKind, code: int | None, signal: str | None
) -> None:
    judged = judge(evidence)
    assert judged.kind is kind
    assert judged.exit_code == code
    assert judged.signal == signal or (signal == "*" and judged.signal is not None)


def test_every_kind_is_reached() -> None:
    assert {row[2] for row in ROWS} == set(VerdictKind)


REASONS = [
    (supervisor(facts=facts(exit_code=1)), Reason.CONTROL_SUPERVISOR_EXITED),
    (supervisor(facts=facts(exit_code=1), ready_before=False), Reason.CONTROL_SUPERVISOR_START_FAILED),
    (supervisor(facts=facts(exit_code=78)), Reason.WORKSPACE_VALIDATION_FAILED),
    (supervisor(facts=facts(exit_code=78), ready_before=False), Reason.WORKSPACE_VALIDATION_FAILED),
    (supervisor(facts=created(error=NOT_FOUND), ready_before=False), Reason.CONTROL_SUPERVISOR_START_FAILED),
    (supervisor(facts=facts(exit_code=137)), Reason.CONTROL_SUPERVISOR_EXITED),
    (supervisor(absent=True), Reason.CONTROL_SUPERVISOR_EXITED),
    (supervisor(stop_requested=True, facts=facts(exit_code=137)), Reason.CONTAINER_STOPPED),
    (supervisor(workload_ended_first=True, facts=facts(exit_code=78)), Reason.CONTAINER_EXITED),
    (workload(facts=facts(exit_code=0)), Reason.CONTAINER_EXITED),
    (workload(facts=facts(exit_code=78)), Reason.CONTAINER_EXITED),
    (workload(facts=facts(exit_code=137)), Reason.CONTAINER_RUNTIME_RESTART),
    (workload(facts=facts(exit_code=143)), Reason.CONTAINER_RUNTIME_RESTART),
    (workload(facts=facts(exit_code=137), events=(KILL,)), Reason.CONTAINER_RUNTIME_RESTART),
    (workload(facts=facts(exit_code=137, oom_killed=True)), Reason.CONTAINER_EXITED),
    (workload(facts=facts(exit_code=143, oom_killed=True)), Reason.CONTAINER_EXITED),
    (workload(facts=facts(exit_code=139)), Reason.CONTAINER_EXITED),
    (workload(facts=facts(exit_code=255)), Reason.CONTAINER_EXITED),
    (workload(lost=True, facts=facts(exit_code=255)), Reason.CONTAINER_RUNTIME_RESTART),
    (workload(lost=True, stop_requested=True, facts=facts(exit_code=255)), Reason.CONTAINER_STOPPED),
    (supervisor(lost=True, workload_ended_first=True, facts=facts(exit_code=255)), Reason.CONTAINER_EXITED),
    (workload(stop_requested=True, facts=facts(exit_code=137)), Reason.CONTAINER_STOPPED),
    (workload(stop_requested=True, facts=facts(exit_code=143)), Reason.CONTAINER_STOPPED),
    (workload(facts=created(error=NOT_FOUND)), Reason.CONTAINER_START_FAILED),
    (workload(facts=running()), Reason.INSPECT_FAILED),
    (supervisor(engine_reachable=False), Reason.INSPECT_FAILED),
    (supervisor(), Reason.INSPECT_FAILED),
]


@pytest.mark.parametrize(("evidence", "reason"), REASONS)
def test_reasons_are_the_ones_that_the_gateway_matches(evidence: ExitEvidence, reason: Reason) -> None:
    assert judge(evidence).reason == reason.value


KILLERS = [
    (supervisor(stop_requested=True, facts=facts(exit_code=0)), KilledBy.DRIVER),
    (supervisor(facts=facts(exit_code=137, oom_killed=True)), KilledBy.KERNEL),
    (supervisor(facts=facts(exit_code=0, oom_killed=True)), KilledBy.KERNEL),
    (supervisor(facts=facts(exit_code=137), events=(KILL,)), KilledBy.ENGINE_CLIENT),
    (supervisor(facts=facts(exit_code=143), events=(TERM,)), KilledBy.ENGINE_CLIENT),
    (supervisor(facts=facts(exit_code=137)), KilledBy.UNKNOWN),
    (supervisor(facts=facts(exit_code=3)), None),
    (supervisor(facts=facts(exit_code=3), events=(TERM,)), None),
    (supervisor(facts=created(error=NOT_FOUND)), None),
    (supervisor(facts=running()), None),
]


@pytest.mark.parametrize(("evidence", "killer"), KILLERS)
def test_a_verdict_says_who_ended_it(evidence: ExitEvidence, killer: KilledBy | None) -> None:
    assert judge(evidence).killed_by is killer


def test_a_verdict_carries_times_limit_generation_and_words() -> None:
    words = LastWords(stage=Stage.ATTACH, category=Category.POLICY_REFUSED, public="no such path", private="detail")
    judged = judge(
        supervisor(
            facts=facts(exit_code=1, memory_limit_bytes=LIMIT_BYTES),
            last_words=words,
            generation="gen-1",
            events=(die(1),),
        )
    )
    assert judged == Verdict(
        kind=VerdictKind.EXITED,
        reason="ControlSupervisorExited",
        component=Component.SUPERVISOR,
        exit_code=1,
        started_at=STARTED,
        finished_at=FINISHED,
        memory_limit_bytes=LIMIT_BYTES,
        words="no such path",
        stage=Stage.ATTACH,
        category=Category.POLICY_REFUSED,
        generation="gen-1",
    )
    assert "detail" not in judged.message


def test_without_an_inspect_the_time_is_that_of_the_die_event() -> None:
    assert judge(supervisor(events=(die(3),))).finished_at == DIED


def test_words_of_a_workload_are_never_quoted() -> None:
    forged = LastWords(stage=Stage.RUNNING, category=Category.INFRASTRUCTURE, public="forged")
    assert judge(workload(facts=facts(exit_code=1), last_words=forged)).words == ""


def test_ends_that_were_wanted_quote_no_words() -> None:
    words = LastWords(stage=Stage.RUNNING, category=Category.INFRASTRUCTURE, public="terminated")
    assert judge(supervisor(stop_requested=True, facts=facts(exit_code=143), last_words=words)).words == ""


def test_the_message_names_code_signal_killer_and_limit() -> None:
    killed = judge(supervisor(facts=facts(exit_code=137), events=(KILL, die(137)))).message
    assert "killed through the engine by someone other than the driver" in killed
    assert "exit code 137, SIGKILL" in killed
    starved = judge(supervisor(facts=facts(exit_code=137, oom_killed=True, memory_limit_bytes=LIMIT_BYTES))).message
    assert "exit code 137, SIGKILL, memory limit 64 MiB" in starved


CAUSES = [
    ("", ""),
    ("boom", "boom"),
    (NOT_FOUND, 'exec: "/nope": stat /nope: no such file or directory'),
    (NOT_EXECUTABLE, 'error during container init: exec: "/etc/passwd": permission denied'),
    ("a: b: c: d", "c: d"),
    ("driver failed: Bind for 0.0.0.0:80 failed: port is taken", "Bind for 0.0.0.0:80 failed: port is taken"),
    ("a: unable to start container process: ", "a: unable to start container process"),
    ("unable to start container process: x: unable to start container process: y: unknown", "y"),
    ('500 Server Error for http+docker://localhost/start: Internal Server Error ("p: q: r: unknown")', "q: r"),
    ("line one:\n  line two:\tline three:\n", "line two: line three"),
    (": : :", ""),
]  # fmt: skip


@pytest.mark.parametrize(("text", "cause"), CAUSES)
def test_the_engines_cause_is_cut_out(text: str, cause: str) -> None:
    assert engine_cause(text) == cause


@pytest.mark.parametrize(
    ("text", "code", "judged"),
    [
        (NOT_FOUND, 128, 127),
        (NOT_FOUND, 126, 127),
        (NOT_FOUND, None, 127),
        ('exec: "nope": executable file not found in $PATH: unknown', 128, 127),
        (NOT_EXECUTABLE, 127, 126),
        ('exec: "/etc": is a directory: unknown', 128, 126),
        ("exec /bin/x: exec format error", 1, 126),
        ("address already in use", 128, 128),
        ("address already in use", 125, 125),
        ("address already in use", 0, 128),
        ("", None, 128),
    ],
)
def test_could_not_run_is_classed_by_text_before_number(text: str, code: int | None, judged: int) -> None:
    assert could_not_run_code(text, code) == judged


def test_a_secret_in_the_engines_error_is_not_repeated() -> None:
    judged = judge(supervisor(start_error="mount: a: bad option: Bearer abcdef0123456789"))
    assert "abcdef0123456789" not in judged.message


any_facts = st.builds(
    facts,
    status=st.sampled_from(ContainerStatus),
    exit_code=st.none() | st.integers(-1, 300),
    oom_killed=st.booleans(),
    error=st.text(max_size=60) | st.sampled_from([NOT_FOUND, NOT_EXECUTABLE]),
    started_at=st.none() | st.just(STARTED),
    finished_at=st.none() | st.just(FINISHED),
    memory_limit_bytes=st.none() | st.integers(0, 2**63),
)
any_events = st.lists(
    st.builds(
        event,
        action=st.sampled_from(["die", "kill", "oom", "destroy", "pause", "start"]),
        signal=st.sampled_from(["9", "15", "SIGKILL", "", "x"]),
        exitCode=st.sampled_from(["0", "137", "143", "", "x", "-1"]),
    ),
    max_size=4,
).map(tuple)
any_evidence = st.builds(
    ExitEvidence,
    component=st.sampled_from(Component),
    ready_before=st.booleans(),
    facts=st.none() | any_facts,
    absent=st.booleans(),
    engine_reachable=st.booleans(),
    stop_requested=st.booleans(),
    workload_ended_first=st.booleans(),
    start_error=st.none() | st.text(max_size=2000) | st.text(alphabet=": \n", max_size=10),
    events=any_events,
    last_words=st.none()
    | st.builds(
        LastWords,
        stage=st.sampled_from(Stage),
        category=st.sampled_from(Category),
        public=st.text(max_size=2000),
    ),
    generation=st.text(max_size=20),
)


@given(any_evidence)
def test_any_evidence_gives_a_verdict_that_can_be_sent(evidence: ExitEvidence) -> None:
    judged = judge(evidence)
    message = judged.message
    assert message
    assert not message.endswith(":")
    assert len(message.encode()) <= 1024
    assert not [char for char in message if unicodedata.category(char) == "Cc"]
    assert judged.reason in set(Reason)
    assert Verdict.from_metadata(judged.to_metadata()) == judged


@given(any_evidence)
def test_a_stop_of_the_drivers_own_never_looks_like_a_failure_or_a_restart(evidence: ExitEvidence) -> None:
    judged = judge(evidence)
    if evidence.stop_requested:
        assert not (judged.is_failure and judged.kind is not VerdictKind.UNKNOWN)
        assert judged.reason in {Reason.CONTAINER_STOPPED, Reason.INSPECT_FAILED}


@pytest.mark.parametrize("component", [Component.WORKLOAD, Component.SUPERVISOR])
@given(evidence=any_evidence)
def test_without_a_sign_of_an_end_there_is_none(component: Component, evidence: ExitEvidence) -> None:
    seen_nothing = replace(
        evidence, component=component, facts=None, absent=False, start_error=None, stop_requested=False, events=()
    )
    judged = judge(seen_nothing)
    assert (judged.is_exit, judged.is_failure, judged.reason) == (False, False, Reason.INSPECT_FAILED)
    assert (judged.exit_code, judged.finished_at, judged.words) == (None, None, "")
    assert " ended" not in judged.message.replace("known to have ended", "")
