"""One gateway process put together: start in order, stop in the opposite order."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import grpc
import structlog

from gateway_embedded.background import BackgroundTasks
from gateway_embedded.client_config import ClientRegistration
from gateway_embedded.config import GatewayConfig
from gateway_embedded.database import Database
from gateway_embedded.deadlines import DeadlineKeeper
from gateway_embedded.dispatch import Dispatcher
from gateway_embedded.driver_link import DriverLink
from gateway_embedded.driver_socket import SocketFault
from gateway_embedded.errors import ConfigurationError
from gateway_embedded.events import EventHub
from gateway_embedded.handshake import DriverIdentity
from gateway_embedded.leftovers import Leftovers
from gateway_embedded.lifecycle import SandboxLifecycle
from gateway_embedded.listen_address import binding_fault
from gateway_embedded.observation import DriverObserver
from gateway_embedded.replays import ReplayGuard
from gateway_embedded.request_ledger import RequestLedger
from gateway_embedded.sandboxes import Phase, SandboxRecord
from gateway_embedded.sessions import SessionEnd, SessionRegistry
from gateway_embedded.state_dir import StateDir
from gateway_embedded.states import SandboxStates
from gateway_embedded.store import SandboxStore
from gateway_embedded.supervision import Supervision
from gateway_embedded.supervisor_service import SupervisorService
from gateway_embedded.tokens import SigningKey, TokenAuthority
from gateway_embedded.user_service import UserService

STOP_PARALLELISM = 16
"""How many sandboxes are stopped at the same time when the gateway exits (compute-driver contract 3.14)."""

_SERVER_GRACE_SECONDS = 1.0
_TASKS_GRACE_SECONDS = 1.0
_STOP_GRACE_SECONDS = 2.0
_MAX_MESSAGE_BYTES = 1024 * 1024
_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # grpc's defaults end the connection of a client that pings more often than every five minutes: a quiet watch.
    ("grpc.http2.max_ping_strikes", 0),
)

_RUNNING = (Phase.PROVISIONING, Phase.READY, Phase.STARTING, Phase.UNKNOWN)


def utc_now() -> datetime:
    """The time now."""
    return datetime.now(UTC)


class Gateway:
    """An embedded gateway. `start` binds the listener, `connect` shakes hands with the driver, `stop` ends it all."""

    def __init__(self, config: GatewayConfig, *, clock: Callable[[], datetime] = utc_now) -> None:
        self._config = config
        self._clock = clock
        self._log = structlog.get_logger("gateway")
        self._undo = contextlib.AsyncExitStack()
        self._loops: list[asyncio.Task[None]] = []
        self.port = 0
        """The bound port; known once `start` has returned."""

    async def start(self) -> int:
        """Claim the state folder, open the store and listen; returns the port.

        Raises:
            ConfigurationError: The folder, the key, the store or the address cannot be used.
        """
        try:
            await self._start()
        except BaseException:
            await self._undo.aclose()
            raise
        return self.port

    async def _start(self) -> None:
        config = self._config
        folder = StateDir.claim(config.state_dir)
        self._undo.callback(folder.release)
        key = SigningKey.open(folder.path / "signing-key.pem")
        database = Database(config.effective_store_url())
        self._undo.push_async_callback(database.close)
        await database.open()
        gateway_id = await database.setting("gateway_id", lambda: str(uuid.uuid4()))
        store = SandboxStore(database)

        self._tasks = BackgroundTasks()
        self._driver = DriverLink(config.compute_driver_socket, policy=config.driver_policy)
        self._undo.push_async_callback(self._driver.close)
        self._undo.push_async_callback(self._close_tasks)
        self._hub = EventHub()
        self._sessions = SessionRegistry()
        self._states = SandboxStates(store, self._hub, self._sessions, self._tasks, clock=self._clock)
        self._stored = await self._states.load()
        authority = TokenAuthority(
            gateway_id=gateway_id,
            key=key,
            lifetime=timedelta(seconds=config.token_lifetime_seconds),
            nonexpiring_gateway_tokens=config.nonexpiring_gateway_tokens,
            clock=lambda: self._clock().timestamp(),
        )
        self._deadlines = DeadlineKeeper(self._states, self._driver, self._tasks, config.deadlines)
        leftovers = Leftovers(self._driver, self._tasks, retry_seconds=config.deadlines.cleanup_retry_seconds)
        self._lifecycle = SandboxLifecycle(self._states, self._driver, authority, leftovers, self._tasks, config)
        self._observer = DriverObserver(self._states, self._driver, leftovers, config.driver_timings)
        replays = ReplayGuard(RequestLedger(database), self._tasks, clock=self._clock)
        users = UserService(
            states=self._states,
            driver=self._driver,
            lifecycle=self._lifecycle,
            replays=replays,
            config=config,
        )
        supervisors = SupervisorService(
            states=self._states,
            supervision=Supervision(self._states, self._deadlines),
            replays=replays,
            authority=authority,
            tasks=self._tasks,
            config=config,
        )
        await self._listen(Dispatcher({**users.handlers(), **supervisors.handlers()}, authority))
        if config.client_config_dir is not None:
            registration = ClientRegistration(
                root=config.client_config_dir, name=config.name, note=folder.path / "client-config-before.json"
            )
            registration.register(endpoint=config.endpoint(self.port), port=self.port)
            self._undo.callback(registration.undo)

    async def _listen(self, dispatcher: Dispatcher) -> None:
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        server.add_generic_rpc_handlers((dispatcher.generic_handler(),))
        host = f"[{self._config.listen_host}]" if ":" in self._config.listen_host else self._config.listen_host
        address = f"{host}:{self._config.listen_port}"
        fault = binding_fault(self._config.listen_host, self._config.listen_port)
        if fault:
            raise ConfigurationError(f"cannot listen on {address}: {fault}")
        try:
            self.port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigurationError(f"cannot listen on {address}; choose another with --listen") from error
        await server.start()

        async def close() -> None:
            self._hub.end()
            self._sessions.end_all(SessionEnd.SHUTDOWN)
            await server.stop(_SERVER_GRACE_SECONDS)

        self._undo.push_async_callback(close)

    async def connect(self) -> DriverIdentity:
        """Shake hands with the driver, then follow it.

        Raises:
            HandshakeError: The driver does not fit this gateway.
            DriverUnreachableError: Nobody answered within the dial window, or nobody can.
            DriverCallError: The driver refused.
        """
        window_seconds = self._config.driver_timings.dial_window_seconds

        def waiting(fault: SocketFault) -> None:
            self._log.warning(
                "waiting for the compute driver",
                socket=str(self._config.compute_driver_socket),
                cause=str(fault),
                at_most_seconds=window_seconds,
            )

        identity = await self._driver.connect(window_seconds=window_seconds, on_wait=waiting)
        self._states.driver_reports_runtime_readiness = identity.reports_runtime_readiness
        self._log.info(
            "compute driver connected",
            driver=identity.driver_name,
            version=identity.driver_version,
            implementation=identity.peer.name,
        )
        self._deadlines.resume(self._stored)
        self._undo.push_async_callback(self._stop_sandboxes)
        self._undo.push_async_callback(self._end_loops)
        for work, name in (
            (self._observer.follow(), "driver watch"),
            (self._observer.sweep_regularly(), "reconcile sweep"),
            (self._deadlines.run(), "deadlines"),
        ):
            self._loops.append(asyncio.create_task(work, name=name))
        return identity

    async def failed(self) -> None:
        """Wait until a part that should run for ever ends; raises what ended it."""
        done, _ = await asyncio.wait(self._loops, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def sweep_now(self) -> None:
        """Compare stored and actual sandboxes without waiting for the next regular sweep.

        Raises:
            DriverCallError: The driver did not list its sandboxes.
        """
        await self._observer.sweep()

    async def settle(self) -> None:
        """Wait until no detached work is left."""
        await self._tasks.settle()

    async def stop(self) -> None:
        """End streams and sessions, then everything else."""
        await self._undo.aclose()

    async def _end_loops(self) -> None:
        for task in self._loops:
            task.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)

    async def _close_tasks(self) -> None:
        await self._tasks.close(grace_seconds=_TASKS_GRACE_SECONDS)

    async def _stop_sandboxes(self) -> None:
        """The orderly stop of a driver whose lifecycle the gateway manages (compute-driver contract 3.1); a switch."""
        if not (self._config.stop_sandboxes_on_exit and self._driver.identity.manages_lifecycle):
            return
        limit = asyncio.Semaphore(STOP_PARALLELISM)

        async def stop(record: SandboxRecord) -> None:
            async with limit:
                await self._lifecycle.stop_for_exit(record)

        running = [record for record in await self._states.store.all() if record.status.phase in _RUNNING]
        try:
            async with asyncio.timeout(_STOP_GRACE_SECONDS):
                await asyncio.gather(*(stop(record) for record in running))
        except TimeoutError:
            self._log.warning("not every sandbox was stopped in time")
