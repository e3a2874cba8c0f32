"""The life of PID 1 once its container has been found in order: serve, run the agent, end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import time
from typing import TYPE_CHECKING

from sandbox_runtime.errors import BootstrapError, PlatformError, RuntimeExit, TreeError
from sandbox_runtime.reaper import Reaper
from sandbox_runtime.tree import ProcessTree

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from sandbox_runtime.backend import SandboxBackend
    from sandbox_runtime.bootstrap import Provisioned
    from sandbox_runtime.logs import Log
    from sandbox_runtime.signals import ReceivedSignal, SignalInbox

_CLOSE_SECONDS = 1.0
"""How long cutting the connections may take once nothing runs any more."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


TRIES_A_SECOND = 20
"""Signals of the workload to its runtime within a second from which on their sender is ended."""


def _kill(pid: int) -> None:
    # Gone already, or of another uid and so nobody whom the agent could have started.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


class StopRequest:
    """An orderly stop that was asked for from outside; the second one ends the process at once.

    The workload cannot stop its own runtime. Where Landlock does not keep it from trying (before ABI 6), a process that
    tries all the time would also hide a stop from outside: of one signal the kernel keeps only the first until it is
    read. Such a process is ended.

    Args:
        log: Where to say what happens; what the workload does at most once a second for each signal.
        clock: Seconds that only grow.
        end: Ends a process of the workload.
    """

    def __init__(
        self, log: Log, *, clock: Callable[[], float] = time.monotonic, end: Callable[[int], None] = _kill
    ) -> None:
        self._log = log
        self._clock = clock
        self._end = end
        self._asked = asyncio.Event()
        self._second_began = -math.inf
        self._tries = 0
        self._told: set[signal.Signals] = set()

    def receive(self, received: ReceivedSignal) -> None:
        """Take SIGTERM or SIGINT."""
        if received.sender_pid != 0:
            self._refuse(received)
            return
        if self._asked.is_set():
            os._exit(128 + received.number)
        self._log.info("Stopping", signal=received.number.name)
        self._asked.set()

    def _refuse(self, received: ReceivedSignal) -> None:
        now = self._clock()
        if now - self._second_began >= 1.0:
            self._second_began, self._tries = now, 0
            self._told.clear()
        self._tries += 1
        facts = {"signal": received.number.name, "sender_pid": received.sender_pid}
        if received.number not in self._told:
            self._told.add(received.number)
            self._log.warning("A process of the workload tried to stop the runtime", **facts)
        if self._tries >= TRIES_A_SECOND:
            if self._tries == TRIES_A_SECOND:
                self._log.warning("It goes on trying, which would hide a stop from outside, and is ended", **facts)
            self._end(received.sender_pid)

    @property
    def asked(self) -> bool:
        """Whether a stop was asked for."""
        return self._asked.is_set()

    async def wait(self) -> None:
        """Return once a stop was asked for."""
        await self._asked.wait()


async def serve(provisioned: Provisioned, inbox: SignalInbox, log: Log) -> int:
    """Serve the boundary until it has ended or a stop is asked for. Returns the exit code (see RuntimeExit).

    Raises:
        BootstrapError: The TLS material cannot be used.
        PlatformError: The control socket cannot be opened.
    """
    loop = asyncio.get_running_loop()
    reaper = Reaper(loop)
    tree = ProcessTree(reaper=reaper)
    stop = StopRequest(log)

    def child_ended(_: ReceivedSignal) -> None:
        reaper.reap()

    inbox.on(signal.SIGCHLD, child_ended)
    for number in STOP_SIGNALS:
        inbox.on(number, stop.receive)
    inbox.attach(loop)

    # These bring grpc and the TLS stack; signals are answered by now.
    from openshell.isolation.errors import IsolationError, cause_of
    from openshell.isolation.server import BoundaryServer
    from openshell.isolation.tls import server_context
    from openshell.isolation.tokens import TokenProfile, TokenVerifier
    from sandbox_runtime.backend import SandboxBackend
    from sandbox_runtime.logging_bridge import take_over_logging

    take_over_logging(log)
    bootstrap = provisioned.bootstrap
    backend = SandboxBackend(bootstrap=bootstrap, reaper=reaper, tree=tree, log=log)
    try:
        tls = server_context(
            certificate_chain_pem=provisioned.certificate_chain_pem, private_key_pem=provisioned.private_key_pem
        )
        verifier = TokenVerifier(
            profile=TokenProfile.SANDBOX,
            gateway_id=bootstrap.gateway_id,
            keys=bootstrap.verification_keys,
            sandbox_id=bootstrap.boundary_id,
            runtime_generation=bootstrap.generation,
            minimum_auth_epoch=bootstrap.auth_epoch,
        )
    except IsolationError as error:
        raise BootstrapError(f"the bootstrap document's keys cannot be used: {error}") from error
    server = BoundaryServer(backend, bootstrap=bootstrap, tls=tls, verifier=verifier)
    socket_path = provisioned.socket_path
    del provisioned, tls
    try:
        await server.start_unix(socket_path)
    except IsolationError as error:
        raise BootstrapError(f"the bootstrap document's listener cannot be used: {error}") from error
    except OSError as error:
        raise PlatformError(f"the control socket {socket_path} cannot be opened: {cause_of(error)}") from error
    log.info("Listening", socket_path=str(socket_path), sandbox_id=bootstrap.boundary_id)
    try:
        stopped = await _first(server.wait_terminal(), stop.wait())
        if stopped:
            await _end_workload(backend, log)
    finally:
        await _close(server.close(), log)
    if stopped:
        return RuntimeExit.STOPPED
    return exit_code(backend, recovery_expired=server.recovery_expired)


def exit_code(backend: SandboxBackend, *, recovery_expired: bool) -> int:
    """The exit code once the boundary has ended.

    Args:
        backend: What ran.
        recovery_expired: Whether it ended for want of a supervisor, and not by request.
    """
    if backend.supervisor_lost or (recovery_expired and backend.main_status is None):
        return RuntimeExit.SUPERVISOR_LOST
    if backend.main_status is None:
        return RuntimeExit.NEVER_STARTED
    return backend.main_status.shell_code


async def _end_workload(backend: SandboxBackend, log: Log) -> None:
    from openshell.isolation.errors import IsolationError

    try:
        # The connections stay open meanwhile, so that the supervisor hears how the agent ended.
        await backend.terminate_boundary()
    except (IsolationError, TreeError) as error:
        log.failure("The workload did not end in time; the kernel ends it with PID 1", detail=str(error))


async def _first(terminal: Coroutine[None, None, None], stop: Coroutine[None, None, None]) -> bool:
    """Wait for either. Returns whether it was the stop."""
    ending, stopping = asyncio.ensure_future(terminal), asyncio.ensure_future(stop)
    try:
        await asyncio.wait((ending, stopping), return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            ending.result()
        return not ending.done()
    finally:
        for task in (ending, stopping):
            task.cancel()
        await asyncio.wait((ending, stopping))


async def _close(closing: Coroutine[None, None, None], log: Log) -> None:
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await closing
    except TimeoutError:
        log.warning("The connections did not close in time")
