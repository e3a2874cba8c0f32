"""The same engine over TCP with TLS and over ssh."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import sys
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from driver_docker.config import DriverConfig
from driver_docker.config_sources import load_config
from driver_docker.engine import EngineUnreachableError
from driver_docker.engine_address import find_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SSH = """#!{python}
import socket, sys, threading
local = sys.argv[sys.argv.index("-L") + 1].split(":", 1)[0]
def pump(source, target):
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass
listener = socket.socket(socket.AF_UNIX)
listener.bind(local)
listener.listen()
print("forwarding", flush=True)
while True:
    near, _ = listener.accept()
    far = socket.socket(socket.AF_UNIX)
    far.connect("{engine}")
    for pair in ((near, far), (far, near)):
        threading.Thread(target=pump, args=pair, daemon=True).start()
"""


class Authority:
    """A certificate authority in a folder, as Docker's certificate folders look."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test CA")])
        certificate = self._sign(self._name, self._key, authority=True)
        (folder / "ca.pem").write_bytes(certificate.public_bytes(Encoding.PEM))

    def _sign(self, name: x509.Name, key: ec.EllipticCurvePrivateKey, *, authority: bool) -> x509.Certificate:
        now = datetime.now(UTC)
        usage = x509.KeyUsage(True, False, False, False, False, authority, authority, False, False)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if not authority:
            address = x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))])
            builder = builder.add_extension(address, critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def issue(self, certificate: str, key: str) -> None:
        """Write a certificate for 127.0.0.1 and its key."""
        own = ec.generate_private_key(ec.SECP256R1())
        signed = self._sign(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "peer")]), own, authority=False)
        (self.folder / certificate).write_bytes(signed.public_bytes(Encoding.PEM))
        (self.folder / key).write_bytes(own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


@asynccontextmanager
async def tls_door(engine: str, authority: Authority) -> AsyncIterator[int]:
    """A TLS port before the engine's socket that demands a client certificate."""
    authority.issue("server.pem", "server-key.pem")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.folder / "ca.pem"))
    context.load_cert_chain(authority.folder / "server.pem", authority.folder / "server-key.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    tasks: set[asyncio.Task[Any]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        near_task = asyncio.current_task()
        assert near_task is not None
        tasks.add(near_task)
        far_reader, far_writer = await asyncio.open_unix_connection(engine)
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def config(**values: Any) -> DriverConfig:
    return load_config({"bind_socket": Path("/run/x/d.sock")} | values, environment={})


def socket_of(docker_host: str) -> str:
    if not docker_host.startswith("unix://"):
        pytest.skip("the engine is not on a Unix socket")
    return docker_host.removeprefix("unix://")


async def test_field_report_48_an_engine_over_tls_is_verified_and_verifies_us(docker_host: str, tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "certs"), Authority(tmp_path / "other")
    authority.issue("cert.pem", "key.pem")
    async with tls_door(socket_of(docker_host), authority) as port:
        address = f"tcp://127.0.0.1:{port}"
        files = {f"docker_tls_{kind}": authority.folder / f"{kind}.pem" for kind in ("ca", "cert", "key")}
        async with await find_engine(config(socket_path=address, **files), {}) as engine:
            await engine.ping()
        environment = {
            "DOCKER_HOST": address,
            "DOCKER_TLS_VERIFY": "1",
            "DOCKER_CERT_PATH": str(authority.folder),
            "DOCKER_CONFIG": str(tmp_path),
        }
        async with await find_engine(config(), environment) as engine:
            assert (await engine.describe()).architecture
        for wrong in (
            config(socket_path=address, docker_tls_ca=other.folder / "ca.pem"),
            config(socket_path=address, docker_tls_ca=authority.folder / "ca.pem"),  # no certificate of ours
            config(socket_path=address),  # no TLS at all
            config(socket_path=address, docker_tls_ca=tmp_path / "absent.pem"),
        ):
            with pytest.raises(EngineUnreachableError) as refused:
                await find_engine(wrong, {})
            assert address in refused.value.message


async def test_field_report_48_an_engine_over_ssh(
    docker_host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "ssh"
    program.write_text(SSH.format(python=sys.executable, engine=socket_of(docker_host)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    async with await find_engine(config(socket_path="ssh://me@there"), {}) as engine:
        await engine.ping()
        stream = await engine.subscribe(kind="container", actions={"create"}, labels={})
        await stream.close()
    with pytest.raises(EngineUnreachableError):
        await engine.ping()


async def test_an_engine_that_is_not_at_the_other_end_is_named_by_its_address(
    docker_host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "ssh"
    program.write_text(SSH.format(python=sys.executable, engine=tmp_path / "none.sock"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(EngineUnreachableError) as refused:
        await find_engine(config(socket_path="ssh://me@there"), {})
    assert "ssh://me@there" in refused.value.message
    assert "openshell-ssh-" not in refused.value.message
