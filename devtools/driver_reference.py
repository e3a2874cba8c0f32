"""The tables of driver_docker/README.md, taken from the driver's code.

``python -m devtools.driver_reference`` rewrites them between their markers; a unit test fails where they differ.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, cast

from devtools.environment import ROOT
from driver_docker.cli import main as command_line
from driver_docker.cli_options import flag_of
from driver_docker.config import DriverConfig
from driver_docker.config_sources import load_config, variables_of
from driver_docker.engine import EngineError
from driver_docker.engine_docker import DockerEngine
from driver_docker.engine_objects import (
    ContainerFacts,
    ContainerSpec,
    ContainerStatus,
    EngineInfo,
    HealthStatus,
    ImageFacts,
    VolumeSpec,
)
from driver_docker.engine_wire import container_body
from driver_docker.events import ConditionStatus
from driver_docker.image_reference import parse_reference
from driver_docker.labels import Owner
from driver_docker.metered_engine import CALLS
from driver_docker.metrics import PREFIX, Metrics
from driver_docker.observe import TOLD
from driver_docker.plan import LaunchPlan, plan_launch
from driver_docker.requests import decode_sandbox
from driver_docker.rpc_observer import METHODS
from driver_docker.sandbox_record import Failure, RecordPhase, SandboxRecord
from driver_docker.sandboxes import SandboxTable
from driver_docker.snapshots import SUSPENDED, take_snapshot
from driver_docker.watch import WatchHub
from openshell.isolation.documents import IdentitySource, WorkloadIdentity
from openshell.wire.compute.v1 import compute_driver_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import click
    import docker

README: Final = ROOT / "driver_docker" / "README.md"
_AT: Final = datetime(2026, 1, 1, tzinfo=UTC)
_ID: Final = "7a0f1c2e-0000-4000-8000-000000000001"
_NONE: Final = "-"

TRANSIENT_REASONS: Final = frozenset(
    {
        "reconcilererror",
        "dependenciesnotready",
        "supervisornotconnected",
        "starting",
        "containerstarting",
        "containercreated",
        "healthcheckstarting",
        "inspectfailed",
    }
)
"""Reasons that a gateway waits for; any other `Ready=False` is final to it (compute-driver contract 4.3)."""

PURPOSES: Final = {
    "Image": "pinned by ID: a tag that moves changes nothing that runs",
    "Entrypoint": "never the image's own",
    "Cmd": "the workload reads its command from the bootstrap",
    "User": "the resolved identity, never 0; the supervisor is nobody",
    "WorkingDir": "the workspace is the runtime's business",
    "Env": "user environment travels in the bootstrap, secrets in files",
    "Healthcheck": "the image's own is off; the driver listens to the supervisor, or asks it, until it is ready",
    "NetworkMode": "the workload has no network at all: the supervisor mediates",
    "LogConfig": "bounded, and readable for the verdict whatever the engine's default",
    "RestartPolicy": "never: the gateway decides what starts",
    "Mounts": "control channel, runtime, supervisor's files; volumes of the caller follow",
    "Tmpfs": "what must be writable; tmpfs mounts of the caller follow",
    "CapDrop": "no capability is given back",
    "SecurityOpt": "and AppArmor where `app_armor_profile` is set",
    "ReadonlyRootfs": "a supervisor writes nothing that stays",
    "NanoCpus": "hard; absent without a limit",
    "Memory": "hard; absent without a limit",
    "MemorySwap": "equal to the memory: no swap beyond it",
    "PidsLimit": "`sandbox_pids_limit`",
    "Dns": "names are resolved by the boundary",
    "DnsSearch": "no search list of the host",
    "ExtraHosts": "only where `grpc_endpoint` has an IPv4 address or localhost",
    "Sysctls": "low ports without a capability",
    "GroupAdd": "absent without supplementary groups",
}

RPC_CALLS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "GetCapabilities": ((), ()),
    "AuthenticateSandbox": ((), ()),
    "ValidateSandboxCreate": (("ping",), ("inspect_image", "inspect_volume", "refresh_info")),
    "GetSandbox": ((), ("inspect_container", "ping")),
    "ListSandboxes": (("list_containers",), ()),
    "CreateSandbox": (
        (
            "ping",
            "inspect_image",
            "create_volume",
            "create_container",
            "inspect_container",
            "put_archive",
            "start_container",
        ),
        (
            "exec_command",
            "wait_for_line",
            "pull_image",
            "inspect_volume",
            "refresh_info",
            "link_target",
            "get_archive",
            "has_path",
            "log_tail",
            "list_containers",
            "remove_container",
            "list_volumes",
            "remove_volume",
        ),
    ),
    "StopSandbox": (
        ("stop_container", "remove_container", "inspect_container", "list_containers"),
        ("unpause_container",),
    ),
    "StartSandbox": (
        ("inspect_container", "inspect_image", "create_container", "put_archive", "start_container"),
        (
            "exec_command",
            "wait_for_line",
            "ping",
            "pull_image",
            "create_volume",
            "inspect_volume",
            "link_target",
            "get_archive",
            "has_path",
            "log_tail",
            "stop_container",
            "list_containers",
            "remove_container",
        ),
    ),
    "DeleteSandbox": (
        ("list_containers", "remove_container", "list_volumes", "remove_volume"),
        ("ping", "inspect_container"),
    ),
    "WatchSandboxes": ((), ()),
    "EnsureWorkspace": ((), ()),
    "DeleteWorkspace": ((), ()),
}
"""Calls to the engine that each RPC makes for one sandbox: always, and when needed. Checked on a real engine."""

EVENT_EFFECTS: Final = {
    "start": "the workload of a stopped sandbox is stopped again; otherwise nothing: starts are the driver's own",
    "die": "the container is examined and judged; see docs/verdicts.md",
    "destroy": "as `die`: the container is gone, and the driver had not removed it",
    "kill": "kept as evidence: it says who killed a container that dies next",
    "oom": "a Warning event `OutOfMemory`; the phase stays, since any process may have been the victim",
    "pause": "the container is looked at again: `Ready=Unknown`, not an error",
    "unpause": "the container is looked at again: ready as before",
}
"""What the driver does on each event of a current container that it did not cause itself."""


def tables() -> dict[str, str]:
    """Every table by its marker."""
    return {
        "commands": _commands(),
        "configuration": _configuration(),
        "containers": _containers(),
        "rpcs": _rpcs(),
        "engine-calls": _engine_calls(),
        "states": _states(),
        "events": _events(),
        "metrics": _metrics(),
    }


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)


def _commands() -> str:
    group = cast("click.Group", command_line)
    rows = []
    for name in ("serve", "check", "sandboxes", "exits", "gc"):
        command = group.commands[name]
        argument = " [SANDBOX]" if name == "exits" else " [--dry-run]" if name == "gc" else ""
        rows.append((f"`{name}{argument}`", " ".join((command.help or "").split())))
    return _table(("Command", "What it does"), rows)


def _configuration() -> str:
    rows = []
    for key, model_field in DriverConfig.model_fields.items():
        flag = flag_of(key)
        variables = ", ".join(f"`{name}`" for name in variables_of(key))
        meaning = " ".join((model_field.description or "").split())
        rows.append((f"`{key}`", f"`{flag}`" if flag else _NONE, variables, _default(key), meaning))
    return _table(("Key", "Flag", "Environment", "Default", "Meaning"), rows)


def _default(key: str) -> str:
    model_field = DriverConfig.model_fields[key]
    if key == "state_dir":
        return "see meaning"
    if model_field.is_required():
        return "must be set"
    value = model_field.get_default(call_default_factory=True)
    if value is None:
        return _NONE
    if hasattr(value, "model_dump"):
        return f"`{json.dumps(value.model_dump(), separators=(',', ':'))}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" if value != {} else "none"


def sample_plan() -> LaunchPlan:
    """The plan of a sandbox with limits and nothing else unusual."""
    message = pb.DriverSandbox(
        id=_ID,
        name="NAME",
        workspace="WORKSPACE",
        spec=pb.DriverSandboxSpec(template=pb.DriverSandboxTemplate(image="IMAGE")),
    )
    message.spec.template.resources.memory_limit = "64Mi"
    message.spec.template.resources.cpu_limit = "500m"
    return plan_launch(
        decode_sandbox(message, namespace="default", allow_driver_config=True),
        config=load_config({"bind_socket": Path("/run/d.sock")}, environment={}),
        owner=Owner(namespace="default", driver="d"),
        image=ImageFacts(image_id="<image ID>"),
        identity=WorkloadIdentity(
            uid=1200, gid=1300, supplementary_gids=(1400,), source=IdentitySource.IMAGE, resource_digest="sha256:w"
        ),
        supervisor_image_id="<image ID>",
        runtime_volume="<runtime volume>",
    )


def _containers() -> str:
    plan = sample_plan()
    workload, supervisor = (_flat(container_body(spec)) for spec in (plan.workload, plan.supervisor))
    named = {
        plan.channel_volume.name: "<channel volume>",
        plan.supervisor_volume.name: "<supervisor volume>",
        _ID: "<id>",
        "1200": "<uid>",
        "1300": "<gid>",
        "1400": "<gid>",
        "NAME": "<name>",
        "500000000": "<limit>",
        str(64 * 2**20): "<limit>",
    }
    keys = list(workload) + [key for key in supervisor if key not in workload]
    rows = [
        (f"`{key}`", _shown(workload.get(key), named), _shown(supervisor.get(key), named), PURPOSES[key])
        for key in keys
    ]
    return _table(("Setting", "Workload", "Supervisor", "Why"), rows)


def _flat(body: dict[str, Any]) -> dict[str, Any]:
    body.pop("Labels")
    host: dict[str, Any] = body.pop("HostConfig")
    return body | host


def _shown(value: Any, named: dict[str, str]) -> str:
    if value is None or value == "":
        return _NONE
    if isinstance(value, list) and value and isinstance(value[0], dict):
        parts = [
            f"{mount['Source']} at {mount['Target']}{', read-only' if mount['ReadOnly'] else ''}" for mount in value
        ]
    elif isinstance(value, list):
        parts = [str(entry) for entry in value]
    elif isinstance(value, dict):
        parts = [f"{key}: {entry if isinstance(entry, str) else json.dumps(entry)}" for key, entry in value.items()]
    else:
        parts = [str(value).lower() if isinstance(value, bool) else str(value)]
    text = "<br>".join(f"`{part}`" for part in parts)
    for found, name in named.items():
        text = re.sub(rf"(?<![0-9A-Za-z]){re.escape(found)}(?![0-9A-Za-z])", name, text)
    return text


def _rpcs() -> str:
    order = [method.name for method in pb.DESCRIPTOR.services_by_name["ComputeDriver"].methods]
    assert set(order) == METHODS == set(RPC_CALLS)  # noqa: S101 - a tool of the developers
    rows = []
    for name in order:
        always, sometimes = RPC_CALLS[name]
        rows.append((f"`{name}`", _listed(always) or "none", _listed(sometimes)))
    return _table(("RPC", "Engine calls", "When needed"), rows)


def _listed(calls: Iterable[str]) -> str:
    return ", ".join(f"`{call}`" for call in calls)


class _RecordingClient:
    """Stands for docker-py's session: notes what is asked and answers something harmless."""

    base_url = "http+docker://x"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def request(self, method: str, url: str, **_more: Any) -> Any:
        path = url.removeprefix(self.base_url).removeprefix("/v1.41")
        self.asked.append(f"{method} {path}")
        return _Answer()

    def close(self) -> None:
        return


class _Answer:
    status_code = 200
    content = b""
    headers: Final[dict[str, str]] = {}

    class raw:  # noqa: N801 - as requests names it
        """A stream at its end."""

        @staticmethod
        def read1(_size: int) -> bytes:
            return b""

        @staticmethod
        def shutdown() -> None:
            return

    def json(self) -> Any:
        return {"Id": "{id}"}

    def iter_lines(self) -> list[bytes]:
        return []

    def iter_content(self, _size: int) -> list[bytes]:
        return []

    def close(self) -> None:
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return


_ARGUMENTS: Final[dict[str, tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "container": (("{id}",), {}),
    "name": (("{name}",), {}),
    "reference": (("{name}",), {}),
    "pull_image": ((parse_reference("example:1"), lambda _: None), {}),
    "link_target": (("{id}", "/"), {}),
    "create_container": ((ContainerSpec(name="{name}", image="i"),), {}),
    "stop_container": (("{id}",), {"grace_seconds": 1}),
    "put_archive": (("{id}", "/", b""), {}),
    "has_path": (("{id}", "/"), {}),
    "get_archive": (("{id}", "/"), {"max_bytes": 1}),
    "log_tail": (("{id}",), {"max_lines": 1}),
    "exec_command": (("{id}", ("x",)), {"timeout_seconds": 1.0}),
    "wait_for_line": (("{id}", "x"), {"timeout_seconds": 1.0}),
    "create_volume": ((VolumeSpec(name="{name}"),), {}),
    "list_containers": (({},), {}),
    "list_volumes": (({},), {}),
    "subscribe": ((), {"kind": "", "actions": (), "labels": {}}),
    "ping": ((), {}),
}


def _engine_calls() -> str:
    asked = asyncio.run(_ask_all())
    rows = [(f"`{call}`", "<br>".join(f"`{line}`" for line in asked[call])) for call in sorted(asked)]
    return _table(("Engine call", "Docker Engine API"), rows)


async def _ask_all() -> dict[str, list[str]]:
    info = EngineInfo(version="20.10", api_version="1.41", operating_system="linux", architecture="amd64")
    found: dict[str, list[str]] = {}
    for call in sorted(CALLS):
        client = _RecordingClient()
        engine = DockerEngine(cast("docker.APIClient", client), info)
        positional, named = _arguments(call)
        try:
            outcome = await getattr(engine, call)(*positional, **named)
            if call == "subscribe":
                await outcome.close()
        except (EngineError, ValueError, KeyError, TypeError, AttributeError):
            pass  # the answer is nonsense; what was asked is what counts
        await engine.close()
        found[call] = client.asked
    return found


def _arguments(call: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if call in _ARGUMENTS:
        return _ARGUMENTS[call]
    if call.endswith("_container"):
        return _ARGUMENTS["container"]
    if call.endswith(("_volume", "_image")):
        return _ARGUMENTS["name"]
    return ((), {})


def _states() -> str:
    rows = [_state(f"engine: `{status.value}`", RecordPhase.ACTIVE, status) for status in ContainerStatus]
    paused = "engine: `running`, the supervisor `paused`"
    rows.append(_state(paused, RecordPhase.ACTIVE, ContainerStatus.RUNNING, supervisor_paused=True))
    rows += [_state(f"driver: {phase.value}", phase, None) for phase in RecordPhase if phase is not RecordPhase.ACTIVE]
    return _table(("State", "`Ready`", "Reason", "To a gateway", "Message"), rows)


def _state(
    name: str, phase: RecordPhase, status: ContainerStatus | None, *, supervisor_paused: bool = False
) -> tuple[str, ...]:
    failure = Failure(reason="<reason of the failure>", message="<the verdict or the fault>", at=_AT)
    record = SandboxRecord(
        sandbox_id="s",
        name="n",
        workspace="w",
        phase=phase,
        changed_at=_AT,
        workload_id="c",
        failure=failure if phase is RecordPhase.FAILED else None,
    )
    facts = None if status is None else _facts(status)
    snapshot = take_snapshot(record, facts, namespace="ns", supervisor_paused=supervisor_paused)
    ready = snapshot.conditions[0]
    if snapshot.deleting:
        meaning = "deleting"
    elif any(condition.type == SUSPENDED for condition in snapshot.conditions):
        meaning = "stopped (`Suspended=True`)"
    elif ready.status is ConditionStatus.TRUE:
        meaning = "ready, once the supervisor's session is there"
    elif ready.status is ConditionStatus.UNKNOWN or ready.reason.lower() in TRANSIENT_REASONS:
        meaning = "provisioning: it waits"
    else:
        meaning = "final error"
    return name, f"`{ready.status.value}`", f"`{ready.reason}`", meaning, ready.message


def _events() -> str:
    assert set(EVENT_EFFECTS) == TOLD  # noqa: S101 - a tool of the developers
    return _table(("Event", "What it does"), [(f"`{event}`", effect) for event, effect in EVENT_EFFECTS.items()])


def _facts(status: ContainerStatus) -> ContainerFacts:
    return ContainerFacts(
        container_id="c",
        name="c",
        image_id="i",
        labels={},
        status=status,
        exit_code=0,
        oom_killed=False,
        error="",
        created_at=_AT,
        started_at=_AT,
        finished_at=_AT if status is ContainerStatus.EXITED else None,
        network_mode="none",
        networks=(),
        health=HealthStatus.NONE,
        memory_limit_bytes=None,
        tty=False,
    )


def _metrics() -> str:
    metrics = Metrics()
    metrics.watch_state(SandboxTable(), WatchHub[str]())
    known = {
        name: tuple(getattr(member, "_labelnames", ()))
        for member in vars(metrics).values()
        if (name := getattr(member, "_name", None)) is not None
    }
    rows = []
    for family in metrics.registry.collect():
        if not family.name.startswith(PREFIX):
            continue
        labels = known.get(family.name) or sorted({key for sample in family.samples for key in sample.labels} - {"le"})
        suffix = "_total" if family.type == "counter" else ""
        rows.append(
            (f"`{family.name}{suffix}`", family.type, _listed(labels) or _NONE, family.documentation.rstrip("."))
        )
    return _table(("Metric", "Type", "Labels", "Meaning"), rows)


def filled_in(text: str) -> str:
    """The README with every table made anew.

    Raises:
        ValueError: A marker is missing.
    """
    for name, table in tables().items():
        pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end of table -->)", re.DOTALL)
        found = pattern.search(text)
        if found is None:
            raise ValueError(f"{README} has no place for the table {name}")
        head, tail = text[: found.start()], text[found.end() :]
        text = f"{head}{found[1]}{table}\n{found[2]}{tail}"
    return text


def main() -> int:
    """Rewrite the README."""
    README.write_text(filled_in(README.read_text("utf-8")), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
