"""The life of the driver process: come up, serve, and leave nothing behind that is not needed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final, Self

import structlog

from driver_docker import encode
from driver_docker.bind_socket import NAMESPACE_LOCK, BindSocket, FileLock
from driver_docker.capabilities import offered_capabilities
from driver_docker.concurrency import Background, together
from driver_docker.engine_address import find_engine
from driver_docker.errors import DriverError
from driver_docker.exits import Exits
from driver_docker.handshake import Handshake
from driver_docker.labels import Owner
from driver_docker.launch import Launcher
from driver_docker.launch_gate import LaunchGate
from driver_docker.lifecycle import Lifecycle
from driver_docker.metered_engine import metered
from driver_docker.metrics import LaunchCounter, Metrics, serving
from driver_docker.observe import Observer
from driver_docker.reclaim import reclaim
from driver_docker.records import RecordStore
from driver_docker.rpc_observer import RpcObserver
from driver_docker.sandboxes import SandboxTable
from driver_docker.server import ComputeDriverService, make_server
from driver_docker.services import Services
from driver_docker.serving_health import ServingHealth
from driver_docker.systemd_notify import notify
from driver_docker.watch import WatchHub

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    import grpc

    from driver_docker.config import DriverConfig
    from driver_docker.engine import Engine
    from driver_docker.events import WatchEvent
    from driver_docker.open_rpcs import OpenRpcs
    from openshell.wire.compute.v1 import compute_driver_pb2 as pb

_DRAIN_SECONDS: Final = 1.0
_LAST_ANSWERS_SECONDS: Final = 0.5
"""For sending the words that RPCs end with; a peer that does not read gets none."""
_ENDING_SECONDS: Final = 4.7
"""For ending as a whole; what the process itself then needs stays within five seconds."""
_KEPT_FOR_TASKS_SECONDS: Final = 1.0
_KEPT_FOR_TIDYING_SECONDS: Final = 0.5
_AFTER_THE_ENGINE_SECONDS: Final = 0.1
"""For a step to see that the engine was given up."""


class Driver:
    """One running driver: engine, records, observation and service.

    Use as an async context manager; entering reclaims and begins to serve, leaving tidies up within five seconds.
    Sandboxes keep running.
    """

    def __init__(self, config: DriverConfig, engine: Engine) -> None:
        self._config = config
        self._engine = engine
        self._stack = AsyncExitStack()
        self._log = structlog.get_logger("driver")
        self.metrics = Metrics()
        self.metrics_port: int | None = None
        """Where metrics are served, once the driver is up."""
        self._health = ServingHealth()
        if config.metrics_port is not None:
            self._engine = metered(engine, self.metrics)
        self.hub: WatchHub[pb.WatchSandboxesEvent] = WatchHub()
        self.services: Services
        self.lifecycle: Lifecycle
        self._launcher: Launcher
        self._server: grpc.aio.Server
        self._ended_by: float | None = None

    async def __aenter__(self) -> Self:
        """Come up.

        Raises:
            ConfigurationError: Another driver holds the socket or the state folder.
            DriverError: The state folder or the engine cannot be used.
        """
        try:
            await self._come_up()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def _come_up(self) -> None:
        config = self._config
        bind = self._stack.enter_context(BindSocket(config.bind_socket))
        store = RecordStore(config.namespace_dir)
        owner = Owner(namespace=config.sandbox_label, driver=store.open())
        lock = FileLock(
            store.directory / NAMESPACE_LOCK,
            held_by=f"another driver uses the state folder {store.directory}; give this one another sandbox_label",
        )
        self._stack.callback(lock.release)
        handshake = Handshake(config.older_gateways, offered=offered_capabilities(self._engine.info))
        background = Background(self._report)
        launches = LaunchCounter(self.metrics)

        def publish(event: WatchEvent) -> None:
            launches.see(event)
            self.hub.publish(encode.watch_event(event, older_gateway=handshake.older))

        def engine_events(connected: bool) -> None:
            self.metrics.engine_events(connected)
            background.spawn(self._health.engine_events(connected), name="health")

        services = self.services = Services(
            engine=self._engine,
            config=config,
            owner=owner,
            store=store,
            table=SandboxTable(),
            handshake=handshake,
            gate=LaunchGate(self._engine, config, handshake),
            publish=publish,
            watched=lambda: self.hub.reader_count > 0,
            metrics=self.metrics,
            engine_events=engine_events,
        )
        self._stack.callback(services.disk.close)
        self.metrics.watch_state(services.table, self.hub)
        if config.metrics_port is not None:
            self.metrics_port = self._stack.enter_context(serving(self.metrics, config.metrics_port))
            self._log.info("metrics served", port=self.metrics_port)
        launcher = self._launcher = Launcher(services)
        self._stack.callback(launcher.close)
        exits = Exits(services, background)
        self.lifecycle = Lifecycle(services, launcher, exits, background)
        observer = Observer(services, self.lifecycle, exits, background)
        await reclaim(services)
        self._stack.push_async_callback(self._tidy)
        self._stack.push_async_callback(self._end_tasks, background)
        background.spawn(observer.follow(), name="engine events")
        background.spawn(observer.look_now_and_then(), name="slow look")
        background.spawn(self._warm_up(), name="warm up")
        service = ComputeDriverService(services, self.lifecycle, self.hub)
        self._server = make_server(service, interceptors=(RpcObserver(self.metrics),))
        self._health.add_to(self._server)
        self._server.add_insecure_port(bind.address)
        bind.restrict()
        await observer.connected()
        await self._server.start()
        self._stack.push_async_callback(self._stop_serving, service.open_rpcs)

    async def _warm_up(self) -> None:
        """Have the newest images and the runtime before the first sandbox needs them.

        A failure is told again to whoever needs what is missing.
        """
        await together(self._refresh(self._config.supervisor_image), self._deliver_runtime())

    async def _refresh(self, reference: str) -> bool:
        try:
            await self._launcher.images.refresh(reference)
        except DriverError as error:
            self._log.warning("image not ready yet", image=reference, error=error.message)
            return False
        return True

    async def _deliver_runtime(self) -> None:
        reference = self._config.sandbox_runtime_image
        if not await self._refresh(reference):
            return
        try:
            image = (await self._launcher.images.find_component(reference)).facts
            await self._launcher.runtime_volumes.ensure(image, reference=reference)
        except DriverError as error:
            self._log.warning("sandbox runtime not ready yet", error=error.message)

    def _report(self, name: str, error: BaseException) -> None:
        if isinstance(error, DriverError):
            self._log.warning("task failed", task=name, error=error.message)
        else:
            self._log.error("task failed unexpectedly", task=name, exc_info=error)

    async def _stop_serving(self, open_rpcs: OpenRpcs) -> None:
        self._ended_by = asyncio.get_running_loop().time() + _ENDING_SECONDS
        await self._health.ending()
        self.hub.close()
        await stop_server(self._server, open_rpcs)
        kept = _KEPT_FOR_TASKS_SECONDS + _KEPT_FOR_TIDYING_SECONDS
        await self._in_time(self.lifecycle.abandon_launches(), "pending launches", kept_seconds=kept)

    async def _end_tasks(self, background: Background) -> None:
        await self._in_time(background.close(), "tasks", kept_seconds=_KEPT_FOR_TIDYING_SECONDS)
        await background.close()  # an engine that was given up lets every task go

    async def _in_time(self, step: Coroutine[Any, Any, None], what: str, *, kept_seconds: float) -> bool:
        """Carry a step of ending out; the engine that it waits for is given up when its time is over.

        One limit for all steps: one that the engine is slow with has what the others did not need.

        Args:
            step: What is to be done. Calls that are not to be interrupted end with the engine's connection alone.
            what: What it is about, for the log.
            kept_seconds: What later steps are to have at least.

        Returns:
            Whether it was done.
        """
        clock = asyncio.get_running_loop().time
        if self._ended_by is None:  # it did not come up
            self._ended_by = clock() + _ENDING_SECONDS
        task = asyncio.create_task(step, name=f"ending: {what}")
        await asyncio.wait({task}, timeout=max(self._ended_by - kept_seconds - clock(), 0.0))
        if not task.done():
            await self._give_engine_up()
            await asyncio.wait({task}, timeout=_AFTER_THE_ENGINE_SECONDS)
            task.cancel()
            await asyncio.wait({task})
        try:
            task.result()
        except asyncio.CancelledError:
            return False
        except DriverError as error:
            self._log.warning("left to the next driver", what=what, error=error.message)
            return False
        return True

    async def _give_engine_up(self) -> None:
        """End every call to an engine that does not answer; what it leaves is reclaimed by the next driver."""
        self._log.warning("the engine does not answer; ending without it")
        await self._engine.close()

    async def _tidy(self) -> None:
        """Remove what no sandbox needs any more."""
        services = self.services
        removing = self._launcher.runtime_volumes.remove_unused()
        is_tidy = await self._in_time(removing, "unused runtime volumes", kept_seconds=0.0)
        # What is left is known to the next driver by this one's name, which is in the folder.
        if is_tidy and not len(services.table):
            await services.disk.run(services.store.forget)

    async def __aexit__(self, *exc_info: object) -> None:
        """Tidy up and end."""
        await self._stack.aclose()


async def stop_server(server: grpc.aio.Server, open_rpcs: OpenRpcs) -> None:
    """Take no more RPCs, let those under way end, and then end them.

    Bounded, whatever peers do: the library's own stop waits for as long as a peer does not read what it was sent.
    """
    stopping = asyncio.create_task(server.stop(_DRAIN_SECONDS + _LAST_ANSWERS_SECONDS), name="stop serving")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            await open_rpcs.drained()
    open_rpcs.end()
    await asyncio.wait({stopping}, timeout=_LAST_ANSWERS_SECONDS)
    if not stopping.done():
        stopping.cancel()
        await asyncio.wait({stopping}, timeout=_LAST_ANSWERS_SECONDS)


async def serve(config: DriverConfig, *, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; a second signal ends the process at once with 128 and its number.

    Args:
        config: The configuration.
        announce: Prints a line once the driver is ready.

    Raises:
        DriverError: The driver could not come up.
    """
    gc.freeze()  # the modules stay; no collection need walk over them again and again
    ending, is_up = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    async def run() -> None:
        async with await find_engine(config, os.environ) as engine:
            info = engine.info
            log.info("engine found", version=info.version, api=info.api_version)
            async with Driver(config, engine):
                is_up.set()
                announce(f"serving on {config.bind_socket}")
                notify(f"READY=1\nSTATUS=serving on {config.bind_socket}")
                await ending.wait()
                notify("STOPPING=1\nSTATUS=ending; sandboxes keep running")
                log.info("ending; sandboxes keep running")

    log = structlog.get_logger("driver")
    running = asyncio.create_task(run(), name="driver")

    def on_signal(number: int) -> None:
        if ending.is_set():
            os._exit(128 + number)
        ending.set()
        if not is_up.is_set():
            running.cancel()  # it may be waiting for an engine that does not answer

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    with contextlib.suppress(asyncio.CancelledError):
        await running
