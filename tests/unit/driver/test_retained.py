from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted.compute_gateway import SECRET, launch_authentication, sandbox

from driver_docker import records
from driver_docker.documents import LaunchDocuments, build_documents
from driver_docker.engine_objects import ContainerFacts, ContainerStatus, HealthStatus
from driver_docker.errors import PreconditionError, RecordError
from driver_docker.records import RecordStore
from driver_docker.requests import decode_sandbox
from driver_docker.retained import CommittedLaunch, RetainedLaunch, committed_files
from driver_docker.sandbox_record import RecordPhase, SandboxRecord
from driver_docker.services import now
from openshell.isolation.documents import BoundaryBootstrap, IdentitySource, MainProcessSpec, WorkloadIdentity
from openshell.isolation.tls import issue_session_tls

if TYPE_CHECKING:
    from collections.abc import Mapping

IDENTITY = WorkloadIdentity(
    uid=1200, gid=1300, supplementary_gids=(1400,), source=IdentitySource.IMAGE, resource_digest="sha256:1"
)
RECORD = SandboxRecord(
    sandbox_id="s-1",
    name="one",
    workspace="default",
    phase=RecordPhase.STOPPED,
    changed_at=now(),
    image_reference="i:1",
)
FACTS = ContainerFacts(
    container_id="c" * 64, name="w", image_id="sha256:1", labels={}, status=ContainerStatus.EXITED, exit_code=0,
    oom_killed=False, error="", created_at=None, started_at=None, finished_at=None, network_mode="none",
    networks=("none",), health=HealthStatus.NONE, memory_limit_bytes=None, tty=False,
)  # fmt: skip


def retained(**changes: Any) -> RetainedLaunch:
    values: dict[str, Any] = {
        "main_process": MainProcessSpec(command=("/bin/true", "two words"), tty=True),
        "workspace_root": "/sandbox",
        "identity": IDENTITY,
        "log_level": "",
        "gpus_attached": False,
        "child_environment": {"MINE": SECRET},
    }
    return RetainedLaunch(**(values | changes))


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    made = RecordStore(tmp_path / "state")
    made.open()
    return made


def documents_of(generation: str, *, child_environment: Mapping[str, str]) -> LaunchDocuments:
    launch = launch_authentication(generation=generation)
    return build_documents(
        sandbox_id="s-1",
        launch=launch,
        tls=issue_session_tls(launch.supervisor.session_id),
        identity=IDENTITY,
        workload=FACTS,
        child_environment=child_environment,
        host_gateway_ip=None,
    )


def commit(store: RecordStore, *, generation: str = "g-1") -> None:
    built = documents_of(generation, child_environment={})
    store.commit_files("s-1", committed_files(built), last=records.AUTH_FILE)


@settings(max_examples=50, deadline=None)
@given(
    environment=st.dictionaries(st.text(min_size=1), st.text(), max_size=4),
    log_level=st.text(max_size=10),
    gpus_attached=st.booleans(),
)
def test_what_a_create_decided_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str], log_level: str, gpus_attached: bool
) -> None:
    store = RecordStore(tmp_path_factory.mktemp("s") / "state")
    store.open()
    kept = retained(child_environment=environment, log_level=log_level, gpus_attached=gpus_attached)
    store.save_files("s-1", kept.to_files())
    assert RetainedLaunch.read(store, "s-1") == kept


def test_the_largest_environment_that_is_accepted_is_read_back(store: RecordStore) -> None:
    """Its JSON is the largest one too: letters that plain JSON would write as six bytes, and such that must be."""
    for value in ("ü" * 60_000, "\x01" * 19_000):
        wanted = sandbox("i:1")
        wanted.spec.environment.update({f"V{number}": value for number in range(4)})
        request = decode_sandbox(wanted, namespace="default", allow_driver_config=False)
        kept = retained(child_environment=request.child_environment)
        store.save_files("s-1", kept.to_files())
        assert RetainedLaunch.read(store, "s-1") == kept
        built = documents_of("g-1", child_environment=request.child_environment)
        assert dict(BoundaryBootstrap.from_json(built.bootstrap).child_env) == request.child_environment


def test_new_credentials_are_advised_only_where_they_would_help(store: RecordStore) -> None:
    for name in retained().to_files():
        store.save_files("s-1", retained().to_files())
        store.remove_files("s-1", [name])
        with pytest.raises(PreconditionError) as missing:
            RetainedLaunch.read(store, "s-1")
        store.save_files("s-1", {name: b"\xff"})
        with pytest.raises(PreconditionError) as damaged:
            RetainedLaunch.read(store, "s-1")
        for refused in (missing, damaged):
            assert refused.value.message.endswith("; delete it and create it again")
            assert "launch_authentication" not in refused.value.message
    with pytest.raises(PreconditionError, match="start it with launch_authentication, or delete it"):
        CommittedLaunch.read(store, "s-1")


def test_what_is_missing_or_damaged_is_named_and_never_quoted(store: RecordStore) -> None:
    for name in retained().to_files():
        files = retained().to_files()
        del files[name]
        store.remove_files("s-1", retained().to_files())
        store.save_files("s-1", files)
        with pytest.raises(PreconditionError, match=name):
            RetainedLaunch.read(store, "s-1")
    damaged = retained().to_files()[records.RETAINED_FILE].replace(b'"uid":1200', b'"uid":-1')
    store.save_files("s-1", retained().to_files() | {records.RETAINED_FILE: damaged})
    with pytest.raises(PreconditionError, match="damaged") as refused:
        RetainedLaunch.read(store, "s-1")
    assert SECRET not in str(refused.value)
    assert SECRET not in repr(retained())


def test_waiting_for_a_client_is_for_the_first_run_alone() -> None:
    kept = retained(main_process=MainProcessSpec(command=("/bin/true",), await_main_process_attachment=True))
    request = kept.as_request(RECORD)
    assert not request.main_process.await_main_process_attachment
    assert (request.sandbox_id, request.name, request.image) == ("s-1", "one", "i:1")


def test_a_committed_launch_is_one_set_that_belongs_together(store: RecordStore) -> None:
    commit(store)
    first = CommittedLaunch.read(store, "s-1")
    assert first.generation == "g-1"
    assert SECRET not in repr(first)
    old_bootstrap = store.read_file("s-1", records.BOOTSTRAP_FILE)
    assert old_bootstrap is not None
    commit(store, generation="g-2")
    assert CommittedLaunch.read(store, "s-1").generation == "g-2"
    store.save_files("s-1", {records.BOOTSTRAP_FILE: old_bootstrap})
    with pytest.raises(PreconditionError, match="damaged"):
        CommittedLaunch.read(store, "s-1")


def test_a_set_that_was_half_written_does_not_count(store: RecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(store)

    def fails(path: Path, data: bytes, *, durable: bool = False) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records, "replace_file", fails)
    with pytest.raises(RecordError, match="No space"):
        commit(store, generation="g-2")
    monkeypatch.undo()
    with pytest.raises(PreconditionError, match=records.AUTH_FILE):
        CommittedLaunch.read(store, "s-1")


@pytest.mark.parametrize(("ends", "fresh"), [(0, True), (1, False), (2**40, True)])
def test_expired_credentials_are_not_used_again(store: RecordStore, ends: int, fresh: bool) -> None:
    commit(store)
    kept = CommittedLaunch.read(store, "s-1")
    kept = replace(kept, auth=replace(kept.auth, sandbox_expires_at=ends))
    if fresh:
        kept.check_fresh("s-1")
    else:
        with pytest.raises(PreconditionError, match="expired"):
            kept.check_fresh("s-1")
