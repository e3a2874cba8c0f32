"""The ssh tunnel: its command line, and a stand-in for ssh that forwards, refuses and dies."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from driver_docker.engine import EngineUnreachableError
from driver_docker.engine_ssh import REMOTE_SOCKET, SshTunnel, ssh_command
from driver_docker.errors import ConfigurationError

if TYPE_CHECKING:
    from asyncio.subprocess import Process

FORWARD = """#!{python}
import os, socket, sys
spec = sys.argv[sys.argv.index("-L") + 1]
local, remote = spec.split(":", 1)
here = os.path.dirname(os.path.abspath(sys.argv[0]))
with open(os.path.join(here, "pids"), "a") as pids:
    pids.write(f"{{os.getpid()}}\\n")
listener = socket.socket(socket.AF_UNIX)
if os.path.exists(local) and "StreamLocalBindUnlink=yes" in sys.argv:
    os.unlink(local)
listener.bind(local)
listener.listen()
print("forwarding", flush=True)
while True:
    connection, _ = listener.accept()
    connection.sendall(remote.encode())
    connection.close()
"""
REFUSE = "#!/bin/sh\necho 'debug: x' >&2\necho 'me@there: Permission denied (publickey).' >&2\nexit 255\n"


def fake_ssh(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "ssh"
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_the_command_asks_nothing_and_names_the_forwarding() -> None:
    command = ssh_command("ssh://me@there:2222/run/user/7/docker.sock", Path("/t/docker.sock"))
    assert command[-2:] == ("--", "there")
    assert command[command.index("-L") + 1] == "/t/docker.sock:/run/user/7/docker.sock"
    assert (command[command.index("-p") + 1], command[command.index("-l") + 1]) == ("2222", "me")
    assert "BatchMode=yes" in command
    default = ssh_command("ssh://there", Path("/t/docker.sock"))
    assert default[default.index("-L") + 1] == f"/t/docker.sock:{REMOTE_SOCKET}"
    assert "-p" not in default


@pytest.mark.parametrize(
    "url",
    [
        "ssh://",
        "ssh://-oProxyCommand=x",
        "ssh://-oX@there",
        "ssh://me:secret@there",
        "ssh://there:70000",
        "ssh://me:secret@there:x",
    ],
)
def test_an_address_that_is_no_host_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        ssh_command(url, Path("/t/docker.sock"))
    assert "secret" not in refused.value.message


async def test_a_tunnel_forwards_comes_back_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ssh(tmp_path, monkeypatch, FORWARD.format(python=sys.executable))
    monkeypatch.setattr("driver_docker.engine_ssh._FIRST_PAUSE_SECONDS", 0.0)
    tunnel = await SshTunnel.open("ssh://me@there")
    local = tunnel.local_url.removeprefix("unix://")
    try:
        assert await said(local) == REMOTE_SOCKET
        assert Path(local).parent.stat().st_mode & 0o077 == 0
        first = int((tmp_path / "pids").read_text())
        os.kill(first, 9)
        async with asyncio.timeout(20):
            await tunnel.restarted()
        assert await said(local) == REMOTE_SOCKET
    finally:
        await tunnel.close()
    second = int((tmp_path / "pids").read_text().split()[1])
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)
    assert not Path(local).parent.exists()


async def test_a_tunnel_comes_back_whatever_a_new_start_failed_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ssh(tmp_path, monkeypatch, FORWARD.format(python=sys.executable))
    monkeypatch.setattr("driver_docker.engine_ssh._FIRST_PAUSE_SECONDS", 0.0)
    tunnel = await SshTunnel.open("ssh://me@there")
    real, failures = tunnel._start, [ValueError("Separator is found, but chunk is longer than limit")]

    async def start() -> Process:
        if failures:
            raise failures.pop()
        return await real()

    monkeypatch.setattr(tunnel, "_start", start)
    try:
        os.kill(int((tmp_path / "pids").read_text()), 9)
        async with asyncio.timeout(20):
            await tunnel.restarted()
        assert failures == []
        assert await said(tunnel.local_url.removeprefix("unix://")) == REMOTE_SOCKET
    finally:
        await tunnel.close()


async def test_the_last_words_of_ssh_are_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ssh(tmp_path, monkeypatch, REFUSE)
    with pytest.raises(EngineUnreachableError, match="Permission denied"):
        await SshTunnel.open("ssh://me@there")


async def said(path: str) -> str:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        return (await reader.read()).decode()
    finally:
        writer.close()
        await writer.wait_closed()
