"""The RPCs that users call: decode, call, encode."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from google.protobuf.message import Message

from gateway_embedded import encoding, requests
from gateway_embedded.config import GatewayConfig
from gateway_embedded.dispatch import Call, Handler
from gateway_embedded.driver_link import DriverLink
from gateway_embedded.errors import (
    SandboxNotFoundError,
    UnavailableError,
)
from gateway_embedded.events import Change, StreamItem
from gateway_embedded.lifecycle import SandboxLifecycle
from gateway_embedded.replays import REPLAYED_METADATA, USERS, ReplayGuard, Work
from gateway_embedded.request_ledger import RequestKey
from gateway_embedded.requests import Page
from gateway_embedded.sandboxes import Phase, PlatformEvent, SandboxRecord
from gateway_embedded.states import SandboxStates
from gateway_embedded.store import SandboxStore, position
from gateway_embedded.version import gateway_version
from openshell.schema import CONTRACT_VERSION
from openshell.wire.v1 import openshell_pb2

NO_LOGS_TEXT = "this gateway keeps no sandbox logs"
"""Warning of a watch that asks for logs."""

PAGE_LIMIT_BYTES = 2 * 1024 * 1024
"""Size at which a page of a listing is cut; clients read messages of up to 4 MiB."""

_READ_AT_ONCE = 64
"""Records that a listing holds in memory at the same time, beside those that it answers with."""

_TERMINAL = (Phase.READY, Phase.ERROR, Phase.COMPLETED, Phase.STOPPED)


class UserService:
    """Handlers of what users call."""

    def __init__(
        self,
        *,
        states: SandboxStates,
        driver: DriverLink,
        lifecycle: SandboxLifecycle,
        replays: ReplayGuard,
        config: GatewayConfig,
    ) -> None:
        self._states = states
        self._driver = driver
        self._lifecycle = lifecycle
        self._replays = replays
        self._config = config

    def handlers(self) -> Mapping[str, Handler]:
        """The handler of every built RPC of users, by name."""
        return {
            "Health": self.health,
            "GetGatewayInfo": self.get_gateway_info,
            "CreateSandbox": self.create_sandbox,
            "GetSandbox": self.get_sandbox,
            "ListSandboxes": self.list_sandboxes,
            "DeleteSandbox": self.delete_sandbox,
            "WatchSandbox": self.watch_sandbox,
        }

    async def health(self, _request: openshell_pb2.HealthRequest, _call: Call) -> Message:
        """Healthy while the compute driver, which passed the handshake, can be reached; degraded otherwise."""
        return openshell_pb2.HealthResponse(status=self._status(), version=CONTRACT_VERSION)

    async def get_gateway_info(self, _request: openshell_pb2.GetGatewayInfoRequest, _call: Call) -> Message:
        """Versions and the negotiated driver."""
        info = openshell_pb2.GetGatewayInfoResponse(status=self._status(), gateway_version=gateway_version())
        if self._driver.connected:
            identity = self._driver.identity
            driver = info.compute_drivers.add(name=self._config.compute_driver)
            driver.capabilities.driver_name = identity.driver_name
            driver.capabilities.driver_version = identity.driver_version
            driver.capabilities.resource_capabilities.ParseFromString(identity.capabilities)
            info.extensions.add(
                kind=openshell_pb2.EXTENSION_KIND_COMPUTE_DRIVER,
                configured_name=self._config.compute_driver,
                implementation_name=identity.peer.name,
                implementation_version=identity.peer.version,
                protocol_major=identity.peer.major,
                protocol_minor=identity.peer.minor,
                supported_capabilities=identity.peer.supported,
                required_capabilities=identity.peer.required,
            )
        return info

    async def create_sandbox(self, request: openshell_pb2.CreateSandboxRequest, call: Call) -> Message:
        """Create a sandbox; a request id makes a repeat harmless."""
        workspace = requests.workspace_of(request.workspace_scope if request.HasField("workspace_scope") else None)
        requests.check_create(request)

        async def work() -> bytes:
            record = await self._lifecycle.create(request, workspace)
            return _response(record).SerializeToString()

        body = await self._once("CreateSandbox", workspace, request, work, call)
        return openshell_pb2.SandboxResponse.FromString(body)

    async def get_sandbox(self, request: openshell_pb2.GetSandboxRequest, _call: Call) -> Message:
        """One sandbox by name."""
        scope = request.workspace_scope if request.HasField("workspace_scope") else None
        workspace = requests.workspace_of(scope)
        return _response(await self._states.find(workspace, requests.sandbox_name(request.name)))

    async def list_sandboxes(self, request: openshell_pb2.ListSandboxesRequest, _call: Call) -> Message:
        """A page of sandboxes, oldest first."""
        page, token = await read_page(self._states.store, requests.page_of(request))
        return openshell_pb2.ListSandboxesResponse(sandboxes=page, next_page_token=token)

    async def delete_sandbox(self, request: openshell_pb2.DeleteSandboxRequest, call: Call) -> Message:
        """Delete a sandbox; `allow_missing` makes its absence no fault."""
        scope = request.workspace_scope if request.HasField("workspace_scope") else None
        workspace = requests.workspace_of(scope)
        name = requests.sandbox_name(request.name)

        async def work() -> bytes:
            try:
                answer = await self._lifecycle.delete(workspace, name)
            except SandboxNotFoundError:
                if not request.allow_missing:
                    raise
                answer = openshell_pb2.DeleteSandboxResponse(outcome=openshell_pb2.DELETION_OUTCOME_ALREADY_ABSENT)
            return answer.SerializeToString()

        body = await self._once("DeleteSandbox", workspace, request, work, call)
        return openshell_pb2.DeleteSandboxResponse.FromString(body)

    async def watch_sandbox(
        self, request: openshell_pb2.WatchSandboxRequest, _call: Call
    ) -> AsyncIterator[openshell_pb2.SandboxStreamEvent]:
        """The sandbox as it is, earlier events, then what happens; ends when the sandbox is gone.

        With `stop_on_terminal` it ends at Ready, Error, Completed or Stopped; where nothing is to be followed, it ends
        after the earlier events.
        """
        scope = request.workspace_scope if request.HasField("workspace_scope") else None
        workspace = requests.workspace_of(scope)
        name = requests.sandbox_name(request.sandbox, field="sandbox")
        requests.check_watch(request)
        record = await self._states.find(workspace, name)
        hub = self._states.hub
        follow_events = request.follow_events or request.event_tail > 0
        with hub.subscribe(
            record.id, event_tail=request.event_tail, resume_after=request.resume_after_cursor
        ) as subscription:
            current = await self._states.store.get(record.id)
            if current is None:
                raise SandboxNotFoundError(f"sandbox {record.name!r} was deleted meanwhile")
            # Every stream begins with the sandbox itself; its cursor is where the replay of events starts, so that a
            # reader that remembers it misses none of them.
            start = subscription.earlier[0].number - 1 if subscription.earlier else hub.latest
            yield _sandbox_event(current, hub.cursor(start))
            if follow_events:
                for item in subscription.earlier:
                    yield self._stream_event(item)
            if request.follow_logs or request.log_tail_lines:
                yield openshell_pb2.SandboxStreamEvent(
                    warning=openshell_pb2.SandboxStreamWarning(message=NO_LOGS_TEXT), cursor=hub.cursor(hub.latest)
                )
            if not (request.follow_status or request.follow_events or request.follow_logs):
                return
            last = current
            while not (request.stop_on_terminal and last.status.phase in _TERMINAL):
                news = await subscription.get()
                if news is None:
                    raise UnavailableError("the gateway is stopping; watch again when it is back")
                if news.content is Change.REMOVED:
                    return
                if isinstance(news.content, SandboxRecord):
                    if news.content.resource_version <= last.resource_version:
                        continue
                    last = news.content
                    if request.follow_status:
                        yield self._stream_event(news)
                elif request.follow_events:
                    yield self._stream_event(news)

    async def _once(
        self,
        method: str,
        workspace: str,
        request: openshell_pb2.CreateSandboxRequest | openshell_pb2.DeleteSandboxRequest,
        work: Work,
        call: Call,
    ) -> bytes:
        key = RequestKey(
            caller=USERS, request_id=requests.request_id(request.request_id), method=method, workspace=workspace
        )
        reply = await self._replays.run(key, requests.payload_of(request), work)
        if reply.replayed:
            call.reply_metadata.append(REPLAYED_METADATA)
        return reply.body

    def _status(self) -> openshell_pb2.ServiceStatus.ValueType:
        return openshell_pb2.SERVICE_STATUS_HEALTHY if self._driver.reachable else openshell_pb2.SERVICE_STATUS_DEGRADED

    def _stream_event(self, item: StreamItem) -> openshell_pb2.SandboxStreamEvent:
        cursor = self._states.hub.cursor(item.number)
        if isinstance(item.content, PlatformEvent):
            return openshell_pb2.SandboxStreamEvent(event=encoding.to_platform_event(item.content), cursor=cursor)
        if isinstance(item.content, SandboxRecord):
            return _sandbox_event(item.content, cursor)
        raise AssertionError(f"no stream event for {item.content}")


async def read_page(store: SandboxStore, page: Page) -> tuple[list[openshell_pb2.Sandbox], str]:
    """The sandboxes of a page and the token of the next one, empty when there is none.

    A page that one message could not carry is cut, down to a single sandbox.
    """
    found: list[openshell_pb2.Sandbox] = []
    total = 0
    after = end = page.after
    while True:
        batch = await store.page(workspace=page.workspace, after=after, limit=_READ_AT_ONCE)
        for record in batch:
            if not page.matches(record.labels):
                continue
            public = encoding.to_sandbox(record)
            total += public.ByteSize()
            if end is not None and (len(found) == page.size or (found and total > PAGE_LIMIT_BYTES)):
                return found, page.token(end)
            found.append(public)
            end = position(record)
        if len(batch) < _READ_AT_ONCE:
            return found, ""
        after = position(batch[-1])


def _response(record: SandboxRecord) -> openshell_pb2.SandboxResponse:
    return openshell_pb2.SandboxResponse(sandbox=encoding.to_sandbox(record))


def _sandbox_event(record: SandboxRecord, cursor: str) -> openshell_pb2.SandboxStreamEvent:
    return openshell_pb2.SandboxStreamEvent(sandbox=encoding.to_sandbox(record), cursor=cursor)
