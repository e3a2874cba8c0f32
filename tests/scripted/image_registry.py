"""A real image registry on loopback, images pushed to it piece by piece, and a relay that can fail on purpose."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import os
import re
import secrets
import subprocess
import tarfile
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import requests

from scripted.stub_images import root_tar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

USER = "tester"
PASSWORD = "s3cret-Passw0rd"
_HTPASSWD = f"{USER}:$2b$04$5uBgpOJrTPwLbTYn3La5YukModS36GMNAsf7k.0B.ZmJuCYrVRe2i\n"
_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
_CONFIG = "application/vnd.docker.container.image.v1+json"
_LISTENING = re.compile(r"listening on (127\.0\.0\.1:\d+)")
_HOLD_AFTER_BYTES = 32 * 1024
_TRICKLE_SECONDS = 0.01
_TLS_HANDSHAKE = b"\x16"
_REQUEST = re.compile(rb"([A-Z]+) (\S+) HTTP/1\.1\r\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedImage:
    """An image in a registry."""

    name: str
    """Repository and tag, to be put after a registry's address."""
    digest: str
    image_id: str
    layers: tuple[str, ...]
    """Digests of its layers, the lowest first."""

    @property
    def repository(self) -> str:
        """The name without its tag."""
        return self.name.partition(":")[0]


class ImageRegistry:
    """A registry in a process of its own.

    Args:
        program: The registry's program.
        folder: Where it keeps everything.
        locked: Whether it asks for `USER` and `PASSWORD`.
    """

    def __init__(self, program: Path, folder: Path, *, locked: bool = False) -> None:
        self._login = (USER, PASSWORD) if locked else None
        config = {
            "version": "0.1",
            "log": {"level": "info"},
            "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
            "http": {"addr": "127.0.0.1:0", "secret": secrets.token_hex(8)},
        }
        if locked:
            (folder / "htpasswd").write_text(_HTPASSWD, "utf-8")
            config["auth"] = {"htpasswd": {"realm": "pull tests", "path": str(folder / "htpasswd")}}
        (folder / "config.yml").write_text(json.dumps(config), "utf-8")  # JSON is YAML
        self._process = subprocess.Popen(
            [str(program), "serve", str(folder / "config.yml")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={"PATH": os.environ["PATH"]},
        )
        self.address = self._await_address()
        self._drain = threading.Thread(target=self._read_on, name="registry log", daemon=True)
        self._drain.start()

    def _await_address(self) -> str:
        said = []
        for line in self._process.stderr or ():
            said.append(line)
            if found := _LISTENING.search(line):
                return found[1]
        raise AssertionError(f"the registry did not come up: {''.join(said)}")

    def _read_on(self) -> None:
        for _ in self._process.stderr or ():
            pass

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()
        self._drain.join()
        if self._process.stderr is not None:
            self._process.stderr.close()

    def push(
        self,
        name: str,
        layers: Sequence[bytes],
        *,
        config: Mapping[str, object] | None = None,
        architecture: str = "amd64",
        system: str = "linux",
    ) -> PushedImage:
        """Put an image together and push it.

        Args:
            name: Repository and tag.
            layers: Uncompressed tars, the lowest first.
            config: The image's `config` object.
            architecture: What it says it is for.
            system: What it says it is for.
        """
        repository, _, tag = name.partition(":")
        body = {
            "architecture": architecture,
            "os": system,
            "config": dict(config or {}),
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer) for layer in layers]},
        }
        packed = [gzip.compress(layer, compresslevel=1, mtime=0) for layer in layers]
        described = json.dumps(body).encode()
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": self._blob(repository, described, _CONFIG),
            "layers": [self._blob(repository, layer, _LAYER) for layer in packed],
        }
        content = json.dumps(manifest).encode()
        self._ask("PUT", f"/v2/{repository}/manifests/{tag}", data=content, headers={"Content-Type": _MANIFEST})
        return PushedImage(
            name=name,
            digest=_digest(content),
            image_id=_digest(described),
            layers=tuple(_digest(layer) for layer in packed),
        )

    def _blob(self, repository: str, content: bytes, media_type: str) -> dict[str, object]:
        digest = _digest(content)
        place = self._ask("POST", f"/v2/{repository}/blobs/uploads/").headers["Location"]
        self._ask("PUT", place, params={"digest": digest}, data=content)
        return {"mediaType": media_type, "size": len(content), "digest": digest}

    def _ask(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        data: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> requests.Response:
        url = path if path.startswith("http") else f"http://{self.address}{path}"
        answer = requests.request(
            method, url, params=params, data=data, headers=headers, auth=self._login, timeout=30.0
        )
        answer.raise_for_status()
        return answer


def workload_layer(marker: str) -> bytes:
    """A root file system that a stand-in runtime can run in, with content that no other image has."""
    return root_tar(
        {
            "etc/passwd": (b"agent:x:1200:1300::/:/bin/sh\n", 0o644),
            "etc/group": (b"agents:x:1300:\n", 0o644),
            "etc/marker": (marker.encode(), 0o644),
        }
    )


def noise_layer(size_bytes: int) -> bytes:
    """A layer of one file that does not compress and that no engine has seen before."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        header = tarfile.TarInfo(f"noise-{secrets.token_hex(4)}")
        header.size = size_bytes
        archive.addfile(header, io.BytesIO(secrets.token_bytes(size_bytes)))
    return buffer.getvalue()


@dataclass(slots=True)
class RegistryRelay:
    """Stands between engine and registry: keeps what was asked for, holds back, and cuts connections.

    Attributes:
        upstream: The registry's address.
        asked: Method and path of every request so far.
        hold: Answers to requests whose path contains this stop in the middle until `let_go` is called.
        trickle: Answers to requests whose path contains this go on slowly after their beginning.
        cut: Answers to requests whose path contains this are cut after `cut_after_bytes`, connection and all; later
            requests for it are answered with 404, upon which an engine tries no more.
    """

    upstream: str
    asked: list[str] = field(default_factory=list)
    hold: str = ""
    trickle: str = ""
    cut: str = ""
    cut_after_bytes: int = 64 * 1024
    address: str = ""
    held: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once an answer is held back or trickles."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the engine went away from such an answer."""
    _let_go: asyncio.Event = field(default_factory=asyncio.Event)
    _closing: asyncio.Event = field(default_factory=asyncio.Event)
    _has_cut: bool = False
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._server is not None:
            self._server.close()
        self._closing.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def count(self, method: str, part: str) -> int:
        """How many requests there were with this method and this part in their path."""
        return sum(1 for entry in self.asked if entry.startswith(f"{method} ") and part in entry)

    def let_go(self) -> None:
        """Pass on what is held back."""
        self._let_go.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        relaying = asyncio.create_task(self._relay(reader, writer))
        closing = asyncio.create_task(self._closing.wait())
        await asyncio.wait({relaying, closing}, return_when=asyncio.FIRST_COMPLETED)
        for part in (relaying, closing):
            part.cancel()
        await asyncio.gather(relaying, closing, return_exceptions=True)
        writer.transport.abort()
        self._tasks.discard(task)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request after the other; an engine that pulls sends no bodies. It tries TLS first, which is refused."""
        first = await reader.readexactly(1)
        if first == _TLS_HANDSHAKE:
            return
        up_host, up_port = self.upstream.split(":")
        up_reader, up_writer = await asyncio.open_connection(up_host, int(up_port))
        answers: asyncio.Task[None] | None = None
        try:
            while True:
                head = first + await reader.readuntil(b"\r\n\r\n")
                first = b""
                found = _REQUEST.match(head)
                assert found is not None
                path = found[2].decode()
                self.asked.append(f"{found[1].decode()} {path}")
                if self.cut and self.cut in path and self._has_cut:
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                    await writer.drain()
                    continue
                if answers is not None:
                    answers.cancel()
                    await asyncio.wait([answers])
                up_writer.write(head)
                answers = asyncio.create_task(self._answer(up_reader, writer, path))
        finally:
            if answers is not None and not answers.done() and self.held.is_set() and not self._let_go.is_set():
                self.left.set()
            if answers is not None:
                answers.cancel()
                await asyncio.wait([answers])
            up_writer.transport.abort()

    async def _answer(self, up_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> None:
        passed = 0
        while chunk := await up_reader.read(16 * 1024):
            writer.write(chunk)
            await writer.drain()
            passed += len(chunk)
            if passed >= _HOLD_AFTER_BYTES:
                if self.hold and self.hold in path:
                    self.held.set()
                    await self._let_go.wait()
                if self.trickle and self.trickle in path:
                    self.held.set()
                    await asyncio.sleep(_TRICKLE_SECONDS)
            if self.cut and self.cut in path and passed >= self.cut_after_bytes:
                self._has_cut = True
                break
        writer.transport.abort()


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
