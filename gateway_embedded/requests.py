"""What users may ask for: names, workspaces, labels, pages; fields that are not built are refused by name."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import secrets
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway_embedded.errors import (
    InvalidRequestError,
    NotBuiltError,
    PermissionDeniedError,
    PreconditionError,
    WorkspaceNotFoundError,
)
from gateway_embedded.policies import check_policy
from gateway_embedded.store import PagePosition
from openshell.wire.datamodel.v1 import datamodel_pb2
from openshell.wire.v1 import openshell_pb2

DEFAULT_WORKSPACE = "default"
"""The one workspace of this gateway; a request still has to name it (public-api contract 2.1)."""

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_LABEL_PART = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = re.compile(rf"([a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_LABEL_PART}", re.ASCII)
_LABEL_VALUE = re.compile(rf"({_LABEL_PART})?", re.ASCII)
_LOG_LEVELS = ("trace", "debug", "info", "warn", "warning", "error")
"""Words of `OPENSHELL_LOG_LEVEL`, in any case; who reads another one takes it for info, silently."""

_UNBUILT_ANNOTATIONS = ("openshell.ai/freeze-policy", "openshell.ai/memory-budget")
"""Annotations that ask for something, of which nothing is built: a promise that is not kept must not be taken."""

_INTERNAL_ANNOTATIONS = "internal.openshell.ai/"
_MAX_MAP_ENTRIES = 256
_MAX_ANNOTATION_BYTES = 32 * 1024
_MAX_COMMAND_BYTES = 256 * 1024


def workspace_of(selector: datamodel_pb2.WorkspaceSelector | None) -> str:
    """The workspace that a request names.

    Raises:
        InvalidRequestError: None is named, or all of them where one is needed.
        WorkspaceNotFoundError: There is no such workspace.
    """
    selection = None if selector is None else selector.WhichOneof("selection")
    if selector is None or selection is None:
        raise InvalidRequestError(
            f"workspace_scope is required; name a workspace, for example {DEFAULT_WORKSPACE!r}",
            field="workspace_scope",
        )
    if selection == "all_workspaces":
        raise InvalidRequestError("this call takes one workspace, not all of them", field="workspace_scope")
    if not selector.workspace:
        raise InvalidRequestError("the name of the workspace is empty", field="workspace_scope.workspace")
    if selector.workspace != DEFAULT_WORKSPACE:
        raise WorkspaceNotFoundError(
            f"workspace {selector.workspace!r} does not exist; this gateway has {DEFAULT_WORKSPACE!r}"
        )
    return selector.workspace


def workspace_or_all(selector: datamodel_pb2.WorkspaceSelector | None) -> str | None:
    """The workspace that a listing names, or nothing for all of them."""
    if selector is not None and selector.WhichOneof("selection") == "all_workspaces":
        return None
    return workspace_of(selector)


def sandbox_name(name: str, *, field: str = "name") -> str:
    """A sandbox's name: lower-case letters, digits and inner hyphens, at most 63.

    Raises:
        InvalidRequestError: It is empty or breaks the rule.
    """
    if not name:
        raise InvalidRequestError(f"{field} is required", field=field)
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{field} {name[:80]!r} is not a sandbox name: use 1 to 63 lower-case letters, digits and inner hyphens",
            field=field,
        )
    return name


def generated_name() -> str:
    """A name for a sandbox whose creator gave none."""
    return f"sandbox-{secrets.token_hex(4)}"


def request_id(text: str) -> str:
    """A request id in lower case; empty when the caller gave none (public-api contract 2.2).

    Raises:
        InvalidRequestError: It is not a hyphenated UUID, or all zero.
    """
    if not text:
        return ""
    try:
        parsed = uuid.UUID(text)
    except ValueError:
        parsed = uuid.UUID(int=0)
    if parsed.int == 0 or str(parsed) != text.lower():
        raise InvalidRequestError("request_id must be a hyphenated UUID that is not zero", field="request_id")
    return str(parsed)


def payload_of(
    request: openshell_pb2.CreateSandboxRequest
    | openshell_pb2.DeleteSandboxRequest
    | openshell_pb2.UpdateConfigRequest,
) -> bytes:
    """What a repeat under the same request id must carry, to the byte: all of a request but the id."""
    payload = type(request).FromString(request.SerializeToString())
    payload.request_id = ""
    return payload.SerializeToString(deterministic=True)


def check_create(request: openshell_pb2.CreateSandboxRequest) -> None:
    """Everything about a create request that needs no driver.

    Raises:
        InvalidRequestError: A part is missing or malformed.
        NotBuiltError: It asks for something that this gateway does not do yet; the field is named.
    """
    if not request.HasField("spec"):
        raise InvalidRequestError("spec is required", field="spec")
    if request.name:
        sandbox_name(request.name)
    _refuse_unbuilt(request)
    _check_labels("labels", request.labels)
    _check_annotations(request.annotations)
    spec = request.spec
    if spec.log_level and spec.log_level.lower() not in _LOG_LEVELS:
        raise InvalidRequestError(
            f"log_level {spec.log_level[:80]!r} is not one of {', '.join(_LOG_LEVELS)}", field="spec.log_level"
        )
    _check_environment("spec.environment", spec.environment)
    _check_environment("spec.template.environment", spec.template.environment)
    _check_labels("spec.template.labels", spec.template.labels)
    if spec.resource_requirements.gpu.HasField("count") and spec.resource_requirements.gpu.count == 0:
        raise InvalidRequestError(
            "a GPU count of 0 asks for nothing; leave gpu out", field="spec.resource_requirements"
        )
    if sum(len(part.encode()) for part in spec.command) > _MAX_COMMAND_BYTES:
        raise InvalidRequestError(f"the command is longer than {_MAX_COMMAND_BYTES} bytes", field="spec.command")
    if any("\0" in part for part in spec.command):
        raise InvalidRequestError("the command has a NUL character", field="spec.command")
    if spec.HasField("policy"):
        check_policy(spec.policy)


def check_watch(request: openshell_pb2.WatchSandboxRequest) -> None:
    """Refuse what would choose among log lines.

    Raises:
        NotBuiltError: It chooses; the field is named.
    """
    unbuilt = {
        "since_time": request.HasField("since_time"),
        "log_sources": bool(request.log_sources),
        "log_min_level": bool(request.log_min_level),
    }
    _refuse(unbuilt)


def check_write_back(request: openshell_pb2.UpdateConfigRequest) -> None:
    """Everything about a supervisor's write-back of its policy that needs no state.

    Raises:
        InvalidRequestError: A part is missing or malformed.
        PreconditionError: The policy asks for what is not built; the supervisor reports such a refusal as one of its
            policy (isolation contract 4.2).
        PermissionDeniedError: It asks for more than a supervisor may.
    """
    unbuilt = {
        "setting_key": bool(request.setting_key),
        "setting_value": request.HasField("setting_value"),
        "delete_setting": request.delete_setting,
        "global": getattr(request, "global"),
        "merge_operations": bool(request.merge_operations),
    }
    asked = [name for name, given in unbuilt.items() if given]
    if asked:
        raise PermissionDeniedError(f"a supervisor may only write back its policy, not use {', '.join(asked)}")
    if not request.HasField("policy"):
        raise InvalidRequestError("policy is required", field="policy")
    _check_annotations(request.annotations)
    if request.policy.network_middlewares:
        raise PreconditionError(
            "policy.network_middlewares is not built in the embedded gateway of this release; leave it out"
        )
    check_policy(request.policy)


def _refuse_unbuilt(request: openshell_pb2.CreateSandboxRequest) -> None:
    spec = request.spec
    never = (openshell_pb2.SANDBOX_RESTART_POLICY_UNSPECIFIED, openshell_pb2.SANDBOX_RESTART_POLICY_NEVER)
    if spec.restart_policy not in openshell_pb2.SandboxRestartPolicy.values():
        raise InvalidRequestError("restart_policy has no known value", field="spec.restart_policy")
    unbuilt = {
        "await_main_process_attachment": request.await_main_process_attachment,
        "workload_template": bool(request.workload_template),
        "service_exposures": bool(request.service_exposures),
        "spec.providers": bool(spec.providers),
        "spec.provider_attachment_epoch": bool(spec.provider_attachment_epoch),
        "spec.restart_policy": spec.restart_policy not in never,
        "spec.policy.network_middlewares": bool(spec.policy.network_middlewares),
    }
    unbuilt |= {f"annotations[{name!r}]": name in request.annotations for name in _UNBUILT_ANNOTATIONS}
    _refuse(unbuilt)


def _refuse(unbuilt: Mapping[str, bool]) -> None:
    asked = [name for name, given in unbuilt.items() if given]
    if asked:
        raise NotBuiltError(f"not built in the embedded gateway of this release: {', '.join(asked)}; leave it out")


def _check_labels(field: str, labels: Mapping[str, str]) -> None:
    if len(labels) > _MAX_MAP_ENTRIES:
        raise InvalidRequestError(f"{field} has more than {_MAX_MAP_ENTRIES} entries", field=field)
    for key, value in labels.items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            raise InvalidRequestError(f"{field} has a malformed entry {key[:80]!r}", field=field)


def _check_annotations(annotations: Mapping[str, str]) -> None:
    if sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items()) > _MAX_ANNOTATION_BYTES:
        raise InvalidRequestError(f"annotations take more than {_MAX_ANNOTATION_BYTES} bytes", field="annotations")
    for key in annotations:
        if not _LABEL_KEY.fullmatch(key):
            raise InvalidRequestError(f"annotations has a malformed key {key[:80]!r}", field="annotations")
        if key.startswith(_INTERNAL_ANNOTATIONS):
            raise InvalidRequestError(f"annotation {key[:80]!r} is the gateway's own", field="annotations")


def _check_environment(field: str, environment: Mapping[str, str]) -> None:
    for key, value in environment.items():
        if not _ENVIRONMENT_NAME.fullmatch(key):
            raise InvalidRequestError(f"{field} has the malformed name {key[:80]!r}", field=field)
        if "\0" in value:
            raise InvalidRequestError(f"the value of {key!r} in {field} has a NUL character", field=field)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of a listing as it was asked for."""

    workspace: str | None
    size: int
    after: PagePosition | None
    matches: Callable[[Mapping[str, str]], bool]
    filter_digest: str

    def token(self, end: PagePosition) -> str:
        """The token that continues behind `end`, valid for the same filter only."""
        text = f"{self.filter_digest}:{end.created_us}:{end.id}"
        return base64.urlsafe_b64encode(text.encode()).decode()


def page_of(request: openshell_pb2.ListSandboxesRequest) -> Page:
    """A listing's page.

    Raises:
        InvalidRequestError: Size, token or label selector are malformed, or the token belongs to another filter.
    """
    workspace = workspace_or_all(request.workspace_scope if request.HasField("workspace_scope") else None)
    if request.page_size < 0:
        raise InvalidRequestError("page_size must not be negative", field="page_size")
    scope = "*" if workspace is None else workspace
    digest = hashlib.sha256(f"{scope}\n{request.label_selector}".encode()).hexdigest()[:12]
    return Page(
        workspace=workspace,
        size=min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE),
        after=_position(request.page_token, digest) if request.page_token else None,
        matches=label_selector(request.label_selector),
        filter_digest=digest,
    )


def label_selector(text: str) -> Callable[[Mapping[str, str]], bool]:
    """A test for ``key=value``, ``key!=value``, ``key`` and ``!key``, comma-separated, all of which must hold.

    Raises:
        InvalidRequestError: A term is malformed.
    """
    tests = [_label_test(term.strip()) for term in text.split(",")] if text.strip() else []
    return lambda labels: all(test(labels) for test in tests)


def _label_test(term: str) -> Callable[[Mapping[str, str]], bool]:
    match = re.fullmatch(r"(?P<not>!?)(?P<key>[^=!,\s]+)(?:\s*(?P<op>==|=|!=)\s*(?P<value>[^=!,\s]*))?", term)
    if match is None or (match["not"] and match["op"]) or not _LABEL_KEY.fullmatch(match["key"]):
        raise InvalidRequestError(f"label_selector has the malformed term {term[:80]!r}", field="label_selector")
    key, operator, value = match["key"], match["op"], match["value"]
    if match["not"]:
        return lambda labels: key not in labels
    if operator is None:
        return lambda labels: key in labels
    if operator == "!=":
        return lambda labels: labels.get(key) != value
    return lambda labels: labels.get(key) == value


def _position(token: str, digest: str) -> PagePosition:
    try:
        text = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True).decode("ascii")
        found, created, sandbox_id = text.split(":")
        position = PagePosition(int(created), str(uuid.UUID(sandbox_id)))
    except (ValueError, binascii.Error) as error:
        raise InvalidRequestError("page_token is not one of this gateway", field="page_token") from error
    if found != digest:
        raise InvalidRequestError("page_token belongs to a listing with another filter", field="page_token")
    if not 0 <= position.created_us < 2**63:
        raise InvalidRequestError("page_token is not one of this gateway", field="page_token")
    return position
