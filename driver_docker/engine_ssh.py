"""An engine on another machine, reached through one `ssh` process that forwards its socket.

The process is started once, before the driver serves, and again when it ends; requests never start one. Keys, host
keys and jump hosts are those of the user's own ssh configuration; nothing is ever asked (`BatchMode`).
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path
from typing import Final, Self
from urllib.parse import unquote, urlsplit

import structlog

from driver_docker.engine import EngineUnreachableError
from driver_docker.errors import ConfigurationError, public_text
from driver_docker.workers import run_aside

REMOTE_SOCKET: Final = "/var/run/docker.sock"
"""The engine's socket on the other machine, where the address names none."""
READY_LINE: Final = "forwarding"
_FORM: Final = "ssh://[user@]host[:port][/socket]"
_OPEN_SECONDS: Final = 20.0
_FIRST_PAUSE_SECONDS: Final = 0.5
_LONGEST_PAUSE_SECONDS: Final = 30.0
_END_SECONDS: Final = 1.0
_STDERR_BYTES: Final = 4096


def ssh_command(url: str, local_socket: Path) -> tuple[str, ...]:
    """The command line that forwards `local_socket` to the engine of an `ssh://[user@]host[:port][/socket]` address.

    Raises:
        ConfigurationError: The address is malformed; a host or user that would be read as an option included.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigurationError(f"the host of an ssh:// address is none; it must be {_FORM}") from None
    try:
        port = parts.port
    except ValueError:
        told = parts.netloc.rpartition("@")[2].rpartition(":")[2]
        raise ConfigurationError(f"{told} is no port of {parts.scheme}://{parts.hostname or ''}") from None
    host, user = parts.hostname or "", unquote(parts.username or "")
    if parts.password is not None:
        raise ConfigurationError(f"{parts.scheme}://{host} has a password, and ssh is given none; use a key")
    if not host or host.startswith("-") or user.startswith("-") or not (host.isprintable() and " " not in host):
        raise ConfigurationError(f"{parts.scheme}://{parts.hostname or ''} must be {_FORM}")
    options = {
        "BatchMode": "yes",
        "ControlPath": "none",
        "ExitOnForwardFailure": "yes",
        "StreamLocalBindUnlink": "yes",
        "StreamLocalBindMask": "0177",
        "ServerAliveInterval": "15",
        "ServerAliveCountMax": "3",
        "ConnectTimeout": "15",
        # ssh runs this once the forwarding is set up: an event to wait for instead of a file to poll.
        "PermitLocalCommand": "yes",
        "LocalCommand": f"echo {READY_LINE}",
    }
    command = ["ssh", "-N", "-T", "-n"]
    for name, value in options.items():
        command += ["-o", f"{name}={value}"]
    if port is not None:
        command += ["-p", str(port)]
    if user:
        command += ["-l", user]
    remote = parts.path if parts.path not in {"", "/"} else REMOTE_SOCKET
    return (*command, "-L", f"{local_socket}:{remote}", "--", host)


class SshTunnel:
    """A forwarded socket that comes back when its process ends."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._folder = folder
        self._command = ssh_command(url, folder / "docker.sock")
        self._log = structlog.get_logger("engine")
        self._keeper: asyncio.Task[None] | None = None
        self._restarted = asyncio.Event()

    async def restarted(self) -> None:
        """Return once the process has been replaced, ever."""
        await self._restarted.wait()

    @property
    def local_url(self) -> str:
        """Where the engine can be reached on this machine."""
        return f"unix://{self._folder / 'docker.sock'}"

    @classmethod
    async def open(cls, url: str) -> Self:
        """Start forwarding.

        Raises:
            ConfigurationError: The address is malformed.
            EngineUnreachableError: The other machine does not let us in; ssh's own last words are in the text.
        """
        folder = Path(await run_aside("ssh folder", lambda: tempfile.mkdtemp(prefix="openshell-ssh-")))
        try:
            tunnel = cls(url, folder)
            process = await tunnel._start()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        tunnel._keeper = asyncio.create_task(tunnel._keep(process), name="ssh tunnel")
        return tunnel

    async def _start(self) -> Process:
        try:
            # A session of its own: a terminal's interrupt is for the driver, which ends the tunnel in its turn.
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, start_new_session=True
            )
        except OSError as error:
            raise EngineUnreachableError(f"no Docker Engine answers at {self._url}: ssh: {error.strerror}") from error
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                assert process.stdout is not None  # noqa: S101 - a pipe was asked for
                if (await process.stdout.readline()).strip() == READY_LINE.encode():
                    return process
                words = await self._words(process)
        except TimeoutError:
            words = f"no connection within {_OPEN_SECONDS:.0f} s"
        except BaseException:
            await _end(process)
            raise
        await _end(process, by_itself=True)
        raise EngineUnreachableError(f"no Docker Engine answers at {self._url}: ssh: {words}")

    @staticmethod
    async def _words(process: Process) -> str:
        assert process.stderr is not None  # noqa: S101 - a pipe was asked for
        text = (await process.stderr.read(_STDERR_BYTES)).decode("utf-8", "replace").strip()
        return public_text(text.splitlines()[-1] if text else "ended without a word", limit_bytes=256)

    async def _keep(self, process: Process) -> None:
        """Start the process again whenever it ends, ever more slowly while that fails."""
        pause = _FIRST_PAUSE_SECONDS
        try:
            while True:
                assert process.stderr is not None  # noqa: S101 - a pipe was asked for
                while await process.stderr.read(_STDERR_BYTES):
                    pass  # read so that ssh never blocks on a full pipe; its exit is what matters
                await process.wait()
                self._log.warning("ssh tunnel ended; starting it again", address=self._url, code=process.returncode)
                while True:
                    await asyncio.sleep(pause)
                    try:
                        process = await self._start()
                    except EngineUnreachableError as error:
                        pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
                        self._log.warning("ssh tunnel not started", error=error.message)
                    except Exception:
                        # Whatever it was: nobody else would ever start the process again.
                        pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
                        self._log.exception("ssh tunnel not started")
                    else:
                        pause = _FIRST_PAUSE_SECONDS
                        self._restarted.set()
                        break
        finally:
            await _end(process)

    async def close(self) -> None:
        """End the process and remove the local socket. Idempotent."""
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
            self._keeper = None
        await run_aside("ssh folder", lambda: shutil.rmtree(self._folder, ignore_errors=True))


async def _end(process: Process, *, by_itself: bool = False) -> None:
    """End a process; one that is ending by itself is given a moment first."""
    if by_itself:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await process.wait()
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_END_SECONDS):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
