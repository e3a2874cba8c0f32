"""Requests about sandboxes, built from plain values. Pure: the synchronous and the asynchronous client share it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openshell._messages.google.protobuf import ListValue, NullValue, Struct, Value
from openshell.datamodel.v1 import AllWorkspaces, WorkspaceSelector
from openshell.errors import InvalidArgumentError
from openshell.v1 import CreateSandboxRequest, SandboxRestartPolicy, SandboxSpec, SandboxTemplate, WatchSandboxRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from openshell.sandbox.v1 import SandboxPolicy

MAX_UINT32 = 2**32 - 1
MAX_INT32 = 2**31 - 1
MAX_EXACT_INTEGER = 2**53
"""Numbers of a protobuf Struct are doubles; larger integers would change on the way."""


def scope_of(workspace: str) -> WorkspaceSelector:
    """The selector of one workspace.

    Raises:
        InvalidArgumentError: The name is empty; a gateway never assumes one.
    """
    if not workspace:
        raise InvalidArgumentError("workspace must not be empty")
    return WorkspaceSelector(workspace=workspace)


def every_workspace() -> WorkspaceSelector:
    """The selector of all workspaces."""
    return WorkspaceSelector(all_workspaces=AllWorkspaces())


def struct_of(values: Mapping[str, object], *, path: str) -> Struct:
    """A protobuf Struct of JSON-like values.

    Raises:
        InvalidArgumentError: A value has no exact form there: NaN, infinities, integers beyond 2^53, other types.
    """
    return Struct(fields={str(key): _value(value, f"{path}.{key}") for key, value in values.items()})


def _value(value: object, path: str) -> Value:
    match value:
        case None:
            return Value(null_value=NullValue(0))
        case bool():
            return Value(bool_value=value)
        case int() if abs(value) <= MAX_EXACT_INTEGER:
            return Value(number_value=float(value))
        case float() if value - value == 0.0:  # neither NaN nor infinite
            return Value(number_value=value)
        case str():
            return Value(string_value=value)
        case dict():
            return Value(struct_value=struct_of(value, path=path))
        case list() | tuple():
            return Value(list_value=ListValue(values=[_value(item, f"{path}[{i}]") for i, item in enumerate(value)]))
        case int() | float():
            raise InvalidArgumentError(
                f"{path}: {value} cannot be sent exactly; integers up to 2^53 and finite numbers can"
            )
        case _:
            raise InvalidArgumentError(f"{path}: a {type(value).__name__} is not a JSON value")


def create_request(
    *,
    name: str,
    workspace: str,
    image: str,
    command: Sequence[str],
    environment: Mapping[str, str] | None,
    labels: Mapping[str, str] | None,
    annotations: Mapping[str, str] | None,
    cpu_limit: str,
    memory_limit: str,
    policy: SandboxPolicy | None,
    tty: bool,
    log_level: str,
    restart_policy: SandboxRestartPolicy,
    driver_config: Mapping[str, object] | None,
    request_id: str,
) -> CreateSandboxRequest:
    """The request that creates a sandbox; see `Sandboxes.create` for the arguments.

    Raises:
        InvalidArgumentError: A value cannot be sent; nothing was sent.
    """
    if isinstance(command, str):
        raise InvalidArgumentError("command must be a sequence of arguments, not one string")
    limits = {key: value for key, value in (("cpu", cpu_limit), ("memory", memory_limit)) if value}
    template = SandboxTemplate(
        image=image,
        resources=struct_of({"limits": limits}, path="resources") if limits else None,
        driver_config=struct_of(driver_config, path="driver_config") if driver_config else None,
    )
    return CreateSandboxRequest(
        name=name,
        workspace_scope=scope_of(workspace),
        labels=dict(labels or {}),
        annotations=dict(annotations or {}),
        request_id=request_id,
        spec=SandboxSpec(
            template=template,
            command=list(command),
            environment=dict(environment or {}),
            policy=policy,
            tty=tty,
            log_level=log_level,
            restart_policy=restart_policy,
        ),
    )


def checked_count(value: int, what: str, *, most: int) -> int:
    """A count that the wire can hold; a larger one would silently become another number.

    Raises:
        InvalidArgumentError: It is negative or larger than ``most``.
    """
    if not 0 <= value <= most:
        raise InvalidArgumentError(f"{what} must be between 0 and {most}, not {value}")
    return value


def watch_request(
    *, name: str, workspace: str, status: bool, events: bool, event_tail: int, stop_on_terminal: bool, cursor: str
) -> WatchSandboxRequest:
    """The request that opens a sandbox's stream; see `Sandboxes.watch` for the arguments.

    Raises:
        InvalidArgumentError: A value cannot be sent; nothing was sent.
    """
    return WatchSandboxRequest(
        sandbox=name,
        workspace_scope=scope_of(workspace),
        follow_status=status,
        follow_events=events,
        event_tail=checked_count(event_tail, "event_tail", most=MAX_UINT32),
        stop_on_terminal=stop_on_terminal,
        resume_after_cursor=cursor,
    )
