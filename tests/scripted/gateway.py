"""A gateway that answers from a script, over a real grpc server on loopback."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from openshell.wire.v1 import openshell_pb2 as pb
from openshell.wire.v1 import openshell_pb2_grpc as pb_grpc

Context = grpc.ServicerContext


@dataclass
class ScriptedGateway(pb_grpc.OpenShellServicer):
    """Keeps sandboxes in a dictionary; streams what a test queues for it."""

    sandboxes: dict[str, pb.Sandbox] = field(default_factory=dict)
    streams: dict[str, list[pb.SandboxStreamEvent | grpc.StatusCode]] = field(default_factory=dict)
    requests: list[Any] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    hold: queue.Queue[None] = field(default_factory=queue.Queue)
    answers: threading.Event = field(default_factory=threading.Event)
    """Cleared by a test, `GetSandbox` hangs until it is set again."""
    endpoint: str = ""

    def __post_init__(self) -> None:
        self.answers.set()

    def _note(self, request: Any, context: Context) -> None:
        self.requests.append(request)
        self.metadata.append({key: str(value) for key, value in context.invocation_metadata()})

    def Health(self, request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
        self._note(request, context)
        return pb.HealthResponse(status=pb.SERVICE_STATUS_HEALTHY, version="0.1.5")

    def CreateSandbox(self, request: pb.CreateSandboxRequest, context: Context) -> pb.SandboxResponse:
        self._note(request, context)
        if request.name in self.sandboxes:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, f"sandbox {request.name!r} exists")
        made = sandbox(request.name, pb.SANDBOX_PHASE_PROVISIONING)
        made.spec.CopyFrom(request.spec)
        self.sandboxes[request.name] = made
        return pb.SandboxResponse(sandbox=made)

    def GetSandbox(self, request: pb.GetSandboxRequest, context: Context) -> pb.SandboxResponse:
        self._note(request, context)
        self.answers.wait()
        if request.name not in self.sandboxes:
            context.abort(grpc.StatusCode.NOT_FOUND, "sandbox not found")
        return pb.SandboxResponse(sandbox=self.sandboxes[request.name])

    def ListSandboxes(self, request: pb.ListSandboxesRequest, context: Context) -> pb.ListSandboxesResponse:
        self._note(request, context)
        names = sorted(self.sandboxes)
        start = int(request.page_token or 0)
        end = start + request.page_size
        token = str(end) if end < len(names) else ""
        return pb.ListSandboxesResponse(
            sandboxes=[self.sandboxes[name] for name in names[start:end]], next_page_token=token
        )

    def DeleteSandbox(self, request: pb.DeleteSandboxRequest, context: Context) -> pb.DeleteSandboxResponse:
        self._note(request, context)
        if self.sandboxes.pop(request.name, None) is None:
            if not request.allow_missing:
                context.abort(grpc.StatusCode.NOT_FOUND, "sandbox not found")
            return pb.DeleteSandboxResponse(outcome=pb.DELETION_OUTCOME_ALREADY_ABSENT)
        return pb.DeleteSandboxResponse(outcome=pb.DELETION_OUTCOME_ACCEPTED)

    def WatchSandbox(self, request: pb.WatchSandboxRequest, context: Context) -> Iterator[pb.SandboxStreamEvent]:
        self._note(request, context)
        if request.sandbox not in self.sandboxes:
            context.abort(grpc.StatusCode.NOT_FOUND, "sandbox not found")
        if not (request.follow_status or request.follow_events):
            yield from (
                item
                for item in self.streams.get(f"{request.sandbox}/past", [])
                if isinstance(item, pb.SandboxStreamEvent)
            )
            return
        for item in self.streams.get(request.sandbox, []):
            if isinstance(item, grpc.StatusCode):
                self.streams[request.sandbox] = self.streams[request.sandbox][
                    self.streams[request.sandbox].index(item) + 1 :
                ]
                context.abort(item, "scripted")
            else:
                yield item
        context.add_callback(lambda: self.hold.put(None))
        self.hold.get()


def sandbox(name: str, phase: int, *, reason: str = "", message: str = "") -> pb.Sandbox:
    made = pb.Sandbox()
    made.metadata.name = name
    made.metadata.id = f"id-of-{name}"
    made.metadata.workspace = "default"
    made.status.phase = phase  # type: ignore[assignment]
    if reason:
        made.status.conditions.add(type="Ready", status="False", reason=reason, message=message)
    return made
