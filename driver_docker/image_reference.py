"""Image references: `[registry[:port]/]path[:tag][@digest]`, taken apart without guessing. Pure.

The grammar is the one that engines and registries share. An engine that is asked to pull a name with neither tag nor
digest pulls every tag there is (docker-py #1643), so `latest` is filled in there, and only there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from driver_docker.errors import InvalidRequestError, public_text

DEFAULT_REGISTRY: Final = "docker.io"
DEFAULT_TAG: Final = "latest"
MUTABLE_TAGS: Final = frozenset({"dev", "latest"})
"""Tags that are moved to new content as a matter of course (compute-driver contract 5.4 item 4)."""

_MAX_NAME_CHARS: Final = 255
_MAX_TEXT_CHARS: Final = 1024
_MAX_SHOWN_BYTES: Final = 128
_DOMAIN_PART: Final = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_DOMAIN: Final = re.compile(rf"(?:{_DOMAIN_PART}(?:\.{_DOMAIN_PART})*|\[[0-9A-Fa-f:]+\])(?::[0-9]+)?")
_PATH_PART: Final = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_PATH: Final = re.compile(rf"{_PATH_PART}(?:/{_PATH_PART})*")
_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST: Final = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9A-Fa-f]{32,}")
_SHA256: Final = re.compile(r"sha256:[0-9a-f]{64}")
_BARE_ID: Final = re.compile(r"[0-9a-f]{64}")


class ImageReferenceError(InvalidRequestError):
    """A text is no image reference; `why` says so without quoting it."""

    def __init__(self, text: str, why: str) -> None:
        shown = public_text(text, limit_bytes=_MAX_SHOWN_BYTES)
        super().__init__(f"{shown!r} is no image reference: {why}")
        self.why = why


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageReference:
    """One image as somebody named it. Make it with `parse_reference`."""

    registry: str
    """Host and port as written, `docker.io` where none is; empty for an image ID."""
    path: str
    """The repository within its registry; empty for an image ID."""
    name: str
    """Registry and path as written, without tag and digest; empty for an image ID."""
    tag: str = ""
    """As written; empty where none is."""
    digest: str = ""
    """As written; for an image ID, the ID."""

    @property
    def is_id(self) -> bool:
        """Whether this is the ID of a local image, which no registry knows."""
        return not self.path

    @property
    def pulled_tag(self) -> str:
        """What to ask a registry for: the digest where there is one, else the tag, else `latest`."""
        return self.digest or self.tag or DEFAULT_TAG

    @property
    def is_mutable(self) -> bool:
        """Whether the same name commonly stands for new content after a while."""
        return not self.digest and (self.tag or DEFAULT_TAG) in MUTABLE_TAGS

    @property
    def local(self) -> str:
        """The name by which an engine finds the image: by digest alone where there is one, else as it was written."""
        if self.is_id:
            return self.digest
        return f"{self.name}@{self.digest}" if self.digest else str(self)

    @property
    def canonical(self) -> str:
        """One spelling for all references that mean the same image."""
        if self.is_id:
            return self.digest
        return f"{self.registry}/{self.path}{'@' if self.digest else ':'}{self.pulled_tag}"

    def __str__(self) -> str:
        """The reference as it was written."""
        if self.is_id:
            return self.digest
        return self.name + (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")


def parse_reference(text: str) -> ImageReference:
    """Take a reference apart.

    Args:
        text: For example `busybox`, `localhost:5000/a/b:1`, `x:1@sha256:…` or an image ID.

    Raises:
        ImageReferenceError: It is none; the text says which part.
    """
    if _SHA256.fullmatch(text) or _BARE_ID.fullmatch(text):
        return ImageReference(registry="", path="", name="", digest=f"sha256:{text.removeprefix('sha256:')}")
    if len(text) > _MAX_TEXT_CHARS:
        raise ImageReferenceError(text, f"it is longer than {_MAX_TEXT_CHARS} characters")
    rest, at, digest = text.partition("@")
    if at and not _DIGEST.fullmatch(digest):
        raise ImageReferenceError(text, "what follows the @ is no digest such as sha256:…")
    # A colon after the last slash begins a tag; one before it belongs to the registry's port.
    head, slash, last = rest.rpartition("/")
    base, colon, tag = last.partition(":")
    if colon and not _TAG.fullmatch(tag):
        raise ImageReferenceError(text, "a tag is up to 128 of A-Z a-z 0-9 _ . -, and neither . nor - begins it")
    name = f"{head}{slash}{base}"
    registry, path = _split_name(name)
    if not _DOMAIN.fullmatch(registry):
        raise ImageReferenceError(text, "the registry is no host name with an optional port")
    if not _PATH.fullmatch(path):
        raise ImageReferenceError(text, "the name must be lower-case words of a-z 0-9, joined by / . _ or -")
    if len(f"{registry}/{path}") > _MAX_NAME_CHARS:
        raise ImageReferenceError(text, f"the name is longer than {_MAX_NAME_CHARS} characters")
    return ImageReference(registry=registry, path=path, name=name, tag=tag, digest=digest)


def _split_name(name: str) -> tuple[str, str]:
    """Registry and path; the first word is a registry only where it cannot be a part of a path."""
    first, slash, rest = name.partition("/")
    if not slash or not (any(char in first for char in ".:") or first == "localhost" or first != first.lower()):
        first, rest = DEFAULT_REGISTRY, name
    if first == "index.docker.io":
        first = DEFAULT_REGISTRY
    if first == DEFAULT_REGISTRY and "/" not in rest:
        rest = f"library/{rest}"
    return first, rest
