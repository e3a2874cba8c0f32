"""Every RPC of the public service, derived from its descriptors, with what this gateway does about it.

The table cannot fall behind the contract: a method that is not named as built answers UNIMPLEMENTED with a reason.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from google.protobuf.descriptor import MethodDescriptor

from openshell.wire.options.v1 import options_pb2
from openshell.wire.v1 import openshell_pb2

SERVICE_NAME = "openshell.v1.OpenShell"

BUILT_RPCS = frozenset(
    {
        "ConnectSupervisor",
        "CreateSandbox",
        "DeleteSandbox",
        "FinalizeMainProcessExit",
        "GetGatewayInfo",
        "GetSandbox",
        "GetSandboxConfig",
        "GetSandboxProviderEnvironment",
        "Health",
        "ListSandboxes",
        "RefreshSandboxToken",
        "ReportMainProcessExit",
        "ReportPolicyStatus",
        "ReportSandboxConfiguration",
        "UpdateConfig",
        "WatchSandbox",
    }
)
"""The RPCs that do something."""


class AuthMode(StrEnum):
    """Who may call an RPC, as its method option says (public-api contract 2)."""

    UNAUTHENTICATED = "unauthenticated"
    BEARER = "bearer"
    DUAL = "dual"
    OPERATOR = "operator"
    SANDBOX = "sandbox"
    PEER = "peer"


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcEntry:
    """One RPC: how it streams, who may call it, and why it is refused when it is not built."""

    name: str
    auth_mode: AuthMode
    client_streaming: bool
    server_streaming: bool
    built: bool
    refusal: str
    """Text of the UNIMPLEMENTED answer; empty when the RPC is built."""
    descriptor: MethodDescriptor

    @property
    def path(self) -> str:
        """The path of the method on the wire."""
        return f"/{SERVICE_NAME}/{self.name}"


@functools.cache
def rpc_table() -> Mapping[str, RpcEntry]:
    """All RPCs of `openshell.v1.OpenShell` by name, in the order in which the contract declares them."""
    service = openshell_pb2.DESCRIPTOR.services_by_name["OpenShell"]
    return {method.name: _entry(method) for method in service.methods}


def _entry(method: MethodDescriptor) -> RpcEntry:
    rule = method.GetOptions().Extensions[options_pb2.authorization]
    mode = AuthMode(rule.auth_mode)
    built = method.name in BUILT_RPCS
    return RpcEntry(
        name=method.name,
        auth_mode=mode,
        client_streaming=method.client_streaming,
        server_streaming=method.server_streaming,
        built=built,
        refusal="" if built else _refusal(method.name, mode),
        descriptor=method,
    )


def _refusal(name: str, mode: AuthMode) -> str:
    if mode is AuthMode.PEER:
        return f"{name} serves gateway replicas; the embedded gateway is a single process and has no peers"
    if mode is AuthMode.OPERATOR:
        return f"{name} needs operator credentials over mutual TLS, which the embedded gateway does not offer"
    return f"{name} is not built in the embedded gateway of this release"
