"""The main process specification and the registered isolation backends, as files and environment carry them."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass

from openshell.isolation.endpoints import Transport, read_transport
from openshell.isolation.errors import DocumentError
from openshell.isolation.json_fields import Fields, dump_json

BUILT_IN_BACKEND = "openshell-sandbox"
"""Name of the built-in backend; no registration may use it."""

_BASE64_PREFIX = "base64url:"
_BACKEND_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MainProcessSpec:
    """What the sandbox's main process is (compute-driver contract 5.6, ``OPENSHELL_MAIN_PROCESS_SPEC``).

    Attributes:
        command: argv; empty means that the supervisor picks the default shell on a terminal.
        tty: whether it gets a terminal.
        await_main_process_attachment: whether it waits for the first attachment before it starts.
    """

    command: tuple[str, ...] = ()
    tty: bool = False
    await_main_process_attachment: bool = False

    def __post_init__(self) -> None:
        if any("\0" in part for part in self.command):
            raise DocumentError("main_process.command", "must not contain NUL")
        if self.command and not self.command[0]:
            raise DocumentError("main_process.command[0]", "must not be empty")

    def to_json(self) -> bytes:
        """The document."""
        return dump_json(
            {
                "version": 1,
                "command": list(self.command),
                "tty": self.tty,
                "await_main_process_attachment": self.await_main_process_attachment,
            }
        )

    def to_base64(self) -> str:
        """The ``base64url:`` form, for transports that cannot carry spaces."""
        return _BASE64_PREFIX + base64.urlsafe_b64encode(self.to_json()).decode("ascii").rstrip("=")

    @classmethod
    def from_json(cls, data: bytes | str) -> MainProcessSpec:
        """Parse the document or its ``base64url:`` form.

        Raises:
            DocumentError: naming the member that is wrong.
        """
        where = "main_process"
        text = data if isinstance(data, str) else data.decode("utf-8", "replace")
        if text.startswith(_BASE64_PREFIX):
            body = text[len(_BASE64_PREFIX) :].strip()
            try:
                data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
            except (binascii.Error, ValueError):
                raise DocumentError(where, "is not base64url") from None
        fields = Fields.parse(data, where)
        if fields.integer("version") != 1:
            raise fields.error("version", "must be 1")
        spec = cls(
            command=fields.texts("command"),
            tty=fields.boolean("tty"),
            await_main_process_attachment=fields.boolean("await_main_process_attachment", default=False),
        )
        fields.finish()
        return spec


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendRegistration:
    """One operator-registered backend (isolation contract 2.5).

    Attributes:
        name: 1 to 128 of ASCII letters, digits, ``-``, ``_``, ``.``; not the built-in's.
        endpoint: where it listens.
    """

    name: str
    endpoint: Transport

    def __post_init__(self) -> None:
        if not _BACKEND_NAME.fullmatch(self.name) or self.name == BUILT_IN_BACKEND:
            raise DocumentError("backends.name", "invalid or reserved delegated backend name")


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationBackends:
    """The operator-owned file of registered backends (isolation contract 1, ``--isolation-backends-file``)."""

    backends: tuple[BackendRegistration, ...] = ()

    def __post_init__(self) -> None:
        if len({b.name for b in self.backends}) != len(self.backends):
            raise DocumentError("isolation_backends.backends", "duplicate isolation backend registration")

    def to_json(self) -> bytes:
        """The document."""
        return dump_json({"backends": [{"name": b.name, "endpoint": b.endpoint.to_object()} for b in self.backends]})

    @classmethod
    def from_json(cls, data: bytes) -> IsolationBackends:
        """Parse the document.

        Raises:
            DocumentError: naming the member that is wrong.
        """
        fields = Fields.parse(data, "isolation_backends")
        path = fields.path("backends")
        backends: list[BackendRegistration] = []
        for index, value in enumerate(fields.array("backends")):
            entry = Fields(value, f"{path}[{index}]")
            backends.append(
                BackendRegistration(name=entry.text("name"), endpoint=read_transport(entry.fields("endpoint")))
            )
            entry.finish()
        fields.finish()
        return cls(backends=tuple(backends))
