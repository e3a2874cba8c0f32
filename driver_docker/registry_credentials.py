"""Credentials for registries, from where `docker login` puts them; each is sent to its own registry and nowhere else.

The file is read at each pull, so that a login takes effect without a restart. Credential helpers are run directly,
never through a shell, bounded in time and output. Nothing of a credential appears in errors, logs or representations.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import os
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from driver_docker.errors import DriverError
from driver_docker.image_reference import DEFAULT_REGISTRY
from driver_docker.regular_file import read_regular
from driver_docker.workers import run_aside
from openshell.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import Mapping

HELPER_TIMEOUT_SECONDS: Final = 15.0
_REAP_SECONDS: Final = 2.0
MAX_FILE_BYTES: Final = 1024 * 1024
MAX_HELPER_BYTES: Final = 64 * 1024

_DEFAULT_REGISTRY_KEY: Final = "https://index.docker.io/v1/"
"""How the docker config and credential helpers name the default registry."""
_HELPER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TOKEN_USER: Final = "<token>"  # noqa: S105 (the marker of an identity token, not one)
_NOT_FOUND: Final = "credentials not found"


class CredentialsError(DriverError):
    """Credentials are configured for a registry and cannot be had; the text names the file or the helper."""

    default_reason = "ImagePullFailed"
    default_status = StatusCode.FAILED_PRECONDITION


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryCredentials:
    """What one registry is shown."""

    registry: str
    server_address: str
    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)
    registry_token: str = field(default="", repr=False)

    @property
    def secrets(self) -> tuple[str, ...]:
        """Every value that must not appear in any text, in each form it is sent in."""
        pair = f"{self.username}:{self.password}".encode()
        known = (self.password, self.identity_token, self.registry_token)
        if not self.password:
            return tuple(secret for secret in known if secret)
        return (*(secret for secret in known if secret), base64.b64encode(pair).decode(), self.header())

    def header(self) -> str:
        """The value of `X-Registry-Auth`."""
        body = {"serveraddress": self.server_address}
        if self.registry_token:
            body["registrytoken"] = self.registry_token
        elif self.identity_token:
            body["identitytoken"] = self.identity_token
        else:
            body |= {"username": self.username, "password": self.password}
        return base64.urlsafe_b64encode(json.dumps(body).encode()).decode()


class RegistryLogins:
    """The logins of the account that the driver runs as.

    Args:
        file: The docker config file; `None` where there is no home to look in.
        environment: The environment that credential helpers get.
        helper_timeout_seconds: How long one may take.
    """

    def __init__(
        self,
        file: Path | None,
        environment: Mapping[str, str],
        *,
        helper_timeout_seconds: float = HELPER_TIMEOUT_SECONDS,
    ) -> None:
        self.file = file
        self._environment = dict(environment)
        self._helper_timeout_seconds = helper_timeout_seconds

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> RegistryLogins:
        """The logins that docker's own client would use: `$DOCKER_CONFIG`, else `~/.docker`."""
        if folder := environment.get("DOCKER_CONFIG"):
            return cls(Path(folder) / "config.json", environment)
        home = environment.get("HOME")
        return cls(Path(home) / ".docker" / "config.json" if home else None, environment)

    @property
    def place(self) -> str:
        """Where logins are looked for, for texts."""
        return str(self.file) if self.file else "no docker config (neither DOCKER_CONFIG nor HOME is set)"

    async def find(self, registry: str) -> RegistryCredentials | None:
        """The credentials for one registry; `None` where there is no login for it.

        Args:
            registry: Host and port as an image reference names them.

        Raises:
            CredentialsError: The file or a helper it names cannot be used.
        """
        config = await run_aside("registry credentials", self._read)
        key = _DEFAULT_REGISTRY_KEY if registry == DEFAULT_REGISTRY else registry
        helper = _text(_table(config.get("credHelpers")).get(key)) or _text(config.get("credsStore"))
        if helper and (found := await self._ask_helper(helper, key, registry)) is not None:
            return found
        return self._stored(_table(config.get("auths")), key, registry)

    def _read(self) -> Mapping[str, Any]:
        if self.file is None:
            return {}
        try:
            content = read_regular(self.file, limit_bytes=MAX_FILE_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            raise CredentialsError(f"docker config {self.file} cannot be read: {error.strerror}") from error
        if len(content) > MAX_FILE_BYTES:
            raise CredentialsError(f"docker config {self.file} is larger than {MAX_FILE_BYTES} bytes")
        try:
            config = json.loads(content or b"{}")
        except (ValueError, RecursionError):
            # Without the parser's words, which may quote the content.
            raise CredentialsError(f"docker config {self.file} is no JSON") from None
        if not isinstance(config, dict):
            raise CredentialsError(f"docker config {self.file} is no JSON object")
        return config

    def _stored(self, auths: Mapping[str, Any], key: str, registry: str) -> RegistryCredentials | None:
        entry = _table(auths.get(key))
        if not entry:
            wanted = _host(key)
            matching = (value for name, value in auths.items() if wanted and _host(name) == wanted)
            entry = _table(next(matching, None))
        username, password = _text(entry.get("username")), _text(entry.get("password"))
        if encoded := _text(entry.get("auth")):
            try:
                pair = base64.b64decode(encoded, validate=True).decode()
            except (binascii.Error, ValueError):
                raise CredentialsError(f"docker config {self.file} holds no readable login for {registry}") from None
            username, _, password = pair.partition(":")
            password = password.rstrip("\0")
        identity, token = _text(entry.get("identitytoken")), _text(entry.get("registrytoken"))
        if not (password or identity or token):
            return None
        return RegistryCredentials(
            registry=registry,
            server_address=key,
            username=username,
            password=password,
            identity_token=identity,
            registry_token=token,
        )

    async def _ask_helper(self, name: str, key: str, registry: str) -> RegistryCredentials | None:
        program = f"docker-credential-{name}"
        if not _HELPER_NAME.fullmatch(name):
            raise CredentialsError(f"docker config {self.file} names a credential helper that is no program name")
        code, output = await self._run_helper(program, key)
        try:
            answer = json.loads(output)
        except (ValueError, RecursionError):
            answer = None
        if code:
            if _NOT_FOUND in output.decode("utf-8", "replace"):
                return None
            # Its words are kept out: nobody knows what a helper prints.
            raise CredentialsError(f"credential helper {program} failed with {code} for {registry}; run it by hand")
        if not isinstance(answer, dict) or not _text(answer.get("Secret")):
            raise CredentialsError(f"credential helper {program} gave no credentials for {registry}")
        username, secret = _text(answer.get("Username")), _text(answer.get("Secret"))
        if username == _TOKEN_USER:
            return RegistryCredentials(registry=registry, server_address=key, identity_token=secret)
        return RegistryCredentials(registry=registry, server_address=key, username=username, password=secret)

    async def _run_helper(self, program: str, key: str) -> tuple[int, bytes]:
        try:
            process = await asyncio.create_subprocess_exec(
                program,
                "get",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=self._environment,
                start_new_session=True,
            )
        except OSError as error:
            raise CredentialsError(
                f"credential helper {program}, which {self.file} names, cannot be run: {error.strerror}"
            ) from error
        try:
            async with asyncio.timeout(self._helper_timeout_seconds):
                return await _converse(process, key.encode(), program)
        except TimeoutError:
            raise CredentialsError(
                f"credential helper {program} did not answer within {self._helper_timeout_seconds:g} s"
            ) from None
        finally:
            # The whole session, in whatever way this ends: a helper may have started others that hold its pipe.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REAP_SECONDS):
                    await process.wait()


async def _converse(process: asyncio.subprocess.Process, question: bytes, program: str) -> tuple[int, bytes]:
    stdin, stdout = process.stdin, process.stdout
    if stdin is None or stdout is None:
        raise CredentialsError(f"credential helper {program} has no pipes")
    with contextlib.suppress(ConnectionError):  # one that does not read says so by what it answers
        stdin.write(question)
        await stdin.drain()
        stdin.close()
    output = bytearray()
    while chunk := await stdout.read(MAX_HELPER_BYTES):
        output += chunk
        if len(output) > MAX_HELPER_BYTES:
            raise CredentialsError(f"credential helper {program} answered with more than {MAX_HELPER_BYTES} bytes")
    return await process.wait(), bytes(output)


def _host(name: str) -> str:
    """Host and port of a key, which may be an address with scheme and path; empty for what is no address."""
    try:
        return urlsplit(name if "://" in name else f"//{name}").netloc.lower()
    except ValueError:
        return ""


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
