"""Strict reading of JSON documents: unknown, missing, duplicate and mistyped members are named, values never quoted."""

from __future__ import annotations

import ipaddress
import json
import re
import uuid
from collections.abc import Mapping, Sequence

from openshell.isolation.errors import DocumentError

MAX_DOCUMENT_BYTES = 1024 * 1024
"""Largest document that is read, in bytes."""

U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1
I64_MAX = 2**63 - 1

JsonObject = dict[str, object]

_GENERATION = re.compile(r"[a-z0-9-]{1,64}")


def _no_constant(name: str) -> object:
    raise DocumentError("document", f"{name} is not JSON")


def _unique(pairs: list[tuple[str, object]]) -> JsonObject:
    members: JsonObject = {}
    for key, value in pairs:
        if key in members:
            raise DocumentError(key, "appears twice")
        members[key] = value
    return members


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


def decode_text(data: bytes | str, where: str) -> str:
    """The text of a document, bounded and valid UTF-8.

    Raises:
        DocumentError: it is too large or not UTF-8.
    """
    if len(data) > MAX_DOCUMENT_BYTES:
        raise DocumentError(where, f"is larger than {MAX_DOCUMENT_BYTES} bytes")
    if isinstance(data, str):
        return data
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise DocumentError(where, "is not UTF-8") from None


def parse_json(data: bytes | str, where: str) -> object:
    """Parse one JSON value; duplicate keys, NaN, trailing data and over-deep nesting are refused.

    Raises:
        DocumentError: it is not one JSON value.
    """
    text = decode_text(data, where)
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        raise DocumentError(where, "is not valid JSON") from None


def verbatim_member(data: bytes | str, key: str, where: str) -> bytes:
    """The bytes of one member of the top-level object exactly as they stand in the document.

    Raises:
        DocumentError: the document is no object or has no such member.
    """
    text = decode_text(data, where)
    blank = re.compile(r"[ \t\n\r]*")

    def skip(at: int) -> int:
        match = blank.match(text, at)
        return match.end() if match else at

    try:
        at = skip(0)
        if text[at] != "{":
            raise DocumentError(where, "must be an object")
        at = skip(at + 1)
        while text[at] != "}":
            name, at = _DECODER.raw_decode(text, at)
            at = skip(at)
            start = skip(at + 1)
            _, end = _DECODER.raw_decode(text, start)
            if name == key:
                return text[start:end].encode("utf-8")
            at = skip(end)
            if text[at] == ",":
                at = skip(at + 1)
    except (ValueError, IndexError, RecursionError):
        raise DocumentError(where, "is not valid JSON") from None
    raise DocumentError(f"{where}.{key}", "is missing")


def dump_json(value: object) -> bytes:
    """Compact UTF-8 JSON in the order given."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8")


def is_integer(value: object) -> bool:
    """Whether a JSON value is an integer (a boolean is not)."""
    return isinstance(value, int) and not isinstance(value, bool)


class Fields:
    """A JSON object that is read member by member, then ``finish``ed so that unknown members are refused.

    Args:
        value: the parsed JSON value.
        where: path of the object for error texts.
    """

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise DocumentError(where, "must be an object")
        self._members: JsonObject = dict(value)
        self.where = where

    @classmethod
    def parse(cls, data: bytes | str, where: str) -> Fields:
        """Parse a document whose top level is an object."""
        return cls(parse_json(data, where), where)

    def path(self, key: str) -> str:
        """The path of a member, for error texts."""
        return f"{self.where}.{key}"

    def error(self, key: str, problem: str) -> DocumentError:
        """An error that names a member."""
        return DocumentError(self.path(key), problem)

    def has(self, key: str) -> bool:
        """Whether the member is there and not null, and was not read yet."""
        return self._members.get(key) is not None

    def take(self, key: str) -> object:
        """The raw member, which must be there.

        Raises:
            DocumentError: it is missing.
        """
        if key not in self._members:
            raise self.error(key, "is missing")
        return self._members.pop(key)

    def finish(self) -> None:
        """Refuse whatever was not read.

        Raises:
            DocumentError: naming the first unknown member.
        """
        for key in sorted(self._members):
            raise self.error(key, "is not a known field")

    def text(self, key: str, *, empty_ok: bool = False, max_bytes: int = MAX_DOCUMENT_BYTES) -> str:
        """A string member."""
        return check_text(self.take(key), self.path(key), empty_ok=empty_ok, max_bytes=max_bytes)

    def optional_text(self, key: str, *, empty_ok: bool = False) -> str | None:
        """A string member that may be null or absent."""
        if self._members.get(key) is None:
            self._members.pop(key, None)
            return None
        return self.text(key, empty_ok=empty_ok)

    def integer(self, key: str, *, minimum: int = 0, maximum: int = U64_MAX) -> int:
        """An integer member within bounds."""
        return check_integer(self.take(key), self.path(key), minimum=minimum, maximum=maximum)

    def boolean(self, key: str, *, default: bool | None = None) -> bool:
        """A boolean member; absent is the default when one is given."""
        if default is not None and key not in self._members:
            return default
        value = self.take(key)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def array(self, key: str) -> list[object]:
        """An array member."""
        value = self.take(key)
        if not isinstance(value, list):
            raise self.error(key, "must be an array")
        return list(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """An array of strings."""
        path = self.path(key)
        return tuple(check_text(v, f"{path}[{i}]", empty_ok=True) for i, v in enumerate(self.array(key)))

    def integers(self, key: str, *, minimum: int = 0, maximum: int = U64_MAX) -> tuple[int, ...]:
        """An array of integers within bounds."""
        path = self.path(key)
        return tuple(
            check_integer(v, f"{path}[{i}]", minimum=minimum, maximum=maximum) for i, v in enumerate(self.array(key))
        )

    def byte_array(self, key: str) -> bytes:
        """Bytes written as an array of integers 0..255."""
        return bytes(self.integers(key, maximum=255))

    def fields(self, key: str) -> Fields:
        """A member that is an object, to be read in turn."""
        return Fields(self.take(key), self.path(key))

    def text_map(self, key: str, *, optional: bool = False) -> dict[str, str]:
        """An object of strings; absent counts as empty when optional."""
        if optional and key not in self._members:
            return {}
        value = self.take(key)
        if not isinstance(value, dict):
            raise self.error(key, "must be an object")
        path = self.path(key)
        return {str(k): check_text(v, f"{path}.{k}", empty_ok=True) for k, v in value.items()}

    def session_id(self, key: str = "session_id") -> str:
        """A canonical lower-case, non-nil UUID."""
        return check_session_id(self.text(key), self.path(key))

    def generation(self, key: str = "generation") -> str:
        """A generation name."""
        return check_generation(self.text(key), self.path(key))


def check_text(value: object, path: str, *, empty_ok: bool = False, max_bytes: int = MAX_DOCUMENT_BYTES) -> str:
    """The value as text.

    Raises:
        DocumentError: not a string, empty though it may not be, too long, or not encodable.
    """
    if not isinstance(value, str):
        raise DocumentError(path, "must be a string")
    if not value and not empty_ok:
        raise DocumentError(path, "must not be empty")
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError:
        raise DocumentError(path, "holds a lone surrogate") from None
    if size > max_bytes:
        raise DocumentError(path, f"is longer than {max_bytes} bytes")
    return value


def check_integer(value: object, path: str, *, minimum: int = 0, maximum: int = U64_MAX) -> int:
    """The value as an integer within bounds.

    Raises:
        DocumentError: not an integer, or out of bounds.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise DocumentError(path, "must be an integer")
    if not minimum <= value <= maximum:
        raise DocumentError(path, f"must be between {minimum} and {maximum}")
    return value


def check_session_id(value: str, path: str) -> str:
    """A session id: canonical lower-case, non-nil UUID (compute-driver contract 5.3)."""
    try:
        parsed = uuid.UUID(value)
    except ValueError:
        raise DocumentError(path, "must be a UUID") from None
    if str(parsed) != value or parsed.int == 0:
        raise DocumentError(path, "must be a canonical lower-case, non-nil UUID")
    return value


def check_generation(value: str, path: str) -> str:
    """A generation: ``[a-z0-9-]{1,64}`` (compute-driver contract 5.3)."""
    if not _GENERATION.fullmatch(value):
        raise DocumentError(path, "must be 1 to 64 characters of a-z, 0-9 and -")
    return value


def check_claims(claims: Mapping[str, str], path: str) -> Mapping[str, str]:
    """Resource claims: keys and values non-empty and without white space (compute-driver contract 5.6)."""
    for key, value in claims.items():
        for part in (key, value):
            if not part or any(c.isspace() for c in part):
                raise DocumentError(f"{path}.{key}", "keys and values must be non-empty, without white space")
    return claims


def check_ipv4(value: str | None, path: str) -> str | None:
    """An IPv4 address or none."""
    if value is not None:
        try:
            ipaddress.IPv4Address(value)
        except ValueError:
            raise DocumentError(path, "must be an IPv4 address or null") from None
    return value


def check_unique(values: Sequence[str], path: str, what: str) -> None:
    """Refuse repeated values."""
    if len(set(values)) != len(values):
        raise DocumentError(path, f"{what} must be unique")


def check_absolute(value: str, path: str) -> str:
    """An absolute path without NUL or ``..``."""
    if not value.startswith("/") or "\0" in value or ".." in value.split("/"):
        raise DocumentError(path, "must be an absolute path without '..'")
    return value
