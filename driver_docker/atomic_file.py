"""Writing a whole file or nothing, for its owner alone."""

from __future__ import annotations

import os
import re
import secrets
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path


_SCRATCH: Final = re.compile(r"\..+\.[0-9a-f]{8}")


def is_scratch(name: str) -> bool:
    """Whether a file is what a process that was killed in the middle of `replace_file` left."""
    return _SCRATCH.fullmatch(name) is not None


def replace_file(file: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace a file by a complete one or not at all; mode 0600.

    Args:
        file: The file; its folder exists.
        data: All of its content.
        durable: Whether to wait until file and folder are on the disk.

    Raises:
        OSError: The disk refused; the old file is as it was.
    """
    scratch = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        scratch.replace(file)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    if durable:
        folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
