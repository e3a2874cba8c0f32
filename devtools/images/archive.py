"""Image archives written without an engine: layers, configuration, and the form that ``docker load`` reads.

Everything is reproducible: entries are sorted, times are zero, owners are numbers, JSON is canonical. The same entries
give the same bytes, so a layer's digest names its content.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

from devtools.images.errors import BuildInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

EPOCH = "1970-01-01T00:00:00Z"
"""The time written wherever an image must name one."""

_ARCHITECTURES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


def local_architecture() -> str:
    """Name this machine's architecture as image configurations do (``amd64``, ``arm64``).

    Raises:
        BuildInputError: for an architecture that images are not built for.
    """
    machine = platform.machine().lower()
    try:
        return _ARCHITECTURES[machine]
    except KeyError:
        known = ", ".join(sorted(set(_ARCHITECTURES.values())))
        raise BuildInputError(f"images cannot be built on a {machine} machine; known are {known}") from None


class EntryKind(Enum):
    """What an entry of a layer is."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file, directory or symbolic link of a layer.

    Attributes:
        path: Where it lies, relative to the root, without a leading slash.
        kind: What it is.
        mode: Permission bits.
        uid: Owner.
        gid: Owning group.
        content: A file's bytes, unless ``source`` is given.
        source: A file to read the bytes from.
        target: What a symbolic link points to.
    """

    path: str
    kind: EntryKind = EntryKind.FILE
    mode: int = 0o444
    uid: int = 0
    gid: int = 0
    content: bytes = field(default=b"", repr=False)
    source: Path | None = None
    target: str = ""

    def __post_init__(self) -> None:
        pure = PurePosixPath(self.path)
        if not pure.parts or pure.is_absolute() or ".." in pure.parts or str(pure) != self.path:
            raise ValueError(f"an entry's path must be relative and normalised, not {self.path!r}")


def directory(path: str, *, mode: int = 0o755, uid: int = 0, gid: int = 0) -> Entry:
    """Describe a directory."""
    return Entry(path=path, kind=EntryKind.DIRECTORY, mode=mode, uid=uid, gid=gid)


def symlink(path: str, target: str) -> Entry:
    """Describe a symbolic link."""
    return Entry(path=path, kind=EntryKind.SYMLINK, mode=0o777, target=target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A written layer.

    Attributes:
        path: Its uncompressed tar file.
        diff_id: ``sha256:`` and the digest of that file.
        size_bytes: The file's size.
    """

    path: Path
    diff_id: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """What an image says of itself.

    Attributes:
        user: ``Config.User``; empty when the image names none.
        working_directory: ``Config.WorkingDir``.
        entrypoint: ``Config.Entrypoint``.
        command: ``Config.Cmd``.
        environment: ``Config.Env`` as a mapping.
        labels: ``Config.Labels``.
        architecture: As image configurations spell it; empty for this machine's.
    """

    user: str = ""
    working_directory: str = "/"
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    architecture: str = ""

    def to_json(self, layers: Sequence[Layer]) -> bytes:
        """Render the image configuration document; its SHA-256 is the image's ID."""
        document = {
            "architecture": self.architecture or local_architecture(),
            "config": {
                "Cmd": list(self.command) or None,
                "Entrypoint": list(self.entrypoint) or None,
                "Env": [f"{name}={value}" for name, value in sorted(self.environment.items())],
                "Labels": dict(sorted(self.labels.items())),
                "User": self.user,
                "WorkingDir": self.working_directory,
            },
            "created": EPOCH,
            "history": [{"created": EPOCH, "created_by": "openshell-docker images"} for _ in layers],
            "os": "linux",
            "rootfs": {"diff_ids": [layer.diff_id for layer in layers], "type": "layers"},
        }
        return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()


class _DigestingFile(io.RawIOBase):
    """Passes bytes on to a file and remembers their digest."""

    def __init__(self, target: IO[bytes]) -> None:
        super().__init__()
        self._target = target
        self.digest = hashlib.sha256()
        self.size_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # type: ignore[override]  # a narrower buffer type
        self.digest.update(data)
        self.size_bytes += len(data)
        self._target.write(data)
        return len(data)


def with_parents(entries: Iterable[Entry]) -> list[Entry]:
    """Sort entries and add the directories above them that are not among them (root's, mode 0755).

    Raises:
        ValueError: when a path is given twice.
    """
    known: dict[str, Entry] = {}
    for entry in entries:
        if entry.path in known:
            raise ValueError(f"{entry.path!r} is in the layer twice")
        known[entry.path] = entry
    for path in list(known):
        for parent in PurePosixPath(path).parents:
            name = str(parent)
            if name != "." and name not in known:
                known[name] = directory(name)
    return sorted(known.values(), key=lambda entry: PurePosixPath(entry.path).parts)


def _header(path: str, *, mode: int, uid: int = 0, gid: int = 0, size: int = 0) -> tarfile.TarInfo:
    header = tarfile.TarInfo(path)
    header.mode, header.uid, header.gid, header.size, header.mtime = mode, uid, gid, size, 0
    return header


def write_layer(entries: Iterable[Entry], path: Path) -> Layer:
    """Write a layer's tar file.

    Args:
        entries: What the layer holds, in any order; missing parent directories are added.
        path: The file to write.
    """
    with path.open("wb") as file:
        digesting = _DigestingFile(file)
        with tarfile.open(fileobj=digesting, mode="w|", format=tarfile.GNU_FORMAT, bufsize=1 << 20) as tar:
            for entry in with_parents(entries):
                header = _header(entry.path, mode=entry.mode, uid=entry.uid, gid=entry.gid)
                if entry.kind is EntryKind.DIRECTORY:
                    header.type = tarfile.DIRTYPE
                    tar.addfile(header)
                elif entry.kind is EntryKind.SYMLINK:
                    header.type, header.linkname = tarfile.SYMTYPE, entry.target
                    tar.addfile(header)
                else:
                    content = entry.source.read_bytes() if entry.source is not None else entry.content
                    header.size = len(content)
                    tar.addfile(header, io.BytesIO(content))
    return Layer(path=path, diff_id=f"sha256:{digesting.digest.hexdigest()}", size_bytes=digesting.size_bytes)


def write_archive(*, reference: str, config: ImageConfig, layers: Sequence[Layer], path: Path) -> str:
    """Write an image in the form that ``docker load`` reads.

    Args:
        reference: The tag that loading gives the image, ``repository:tag``.
        config: What the image says of itself.
        layers: Its layers, lowest first.
        path: The file to write.

    Returns:
        The image's ID, ``sha256:`` and 64 hexadecimal digits.
    """
    document = config.to_json(layers)
    image_hex = hashlib.sha256(document).hexdigest()
    names = [f"{layer.diff_id.removeprefix('sha256:')}/layer.tar" for layer in layers]
    manifest = [{"Config": f"{image_hex}.json", "Layers": names, "RepoTags": [reference]}]
    small = {
        "manifest.json": json.dumps(manifest, separators=(",", ":"), sort_keys=True).encode(),
        f"{image_hex}.json": document,
    }
    with path.open("wb") as file, tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in small.items():
            tar.addfile(_header(name, mode=0o444, size=len(content)), io.BytesIO(content))
        for name, layer in zip(names, layers, strict=True):
            folder = _header(str(PurePosixPath(name).parent), mode=0o755)
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
            with layer.path.open("rb") as content_file:
                tar.addfile(_header(name, mode=0o444, size=layer.size_bytes), content_file)
    return f"sha256:{image_hex}"
