"""Reading files that others may have put in place: only regular ones, so that no read waits for ever."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def read_regular(file: Path, *, limit_bytes: int | None = None) -> bytes:
    """The content of a file. A pipe, socket, device or folder is refused unread; links are followed.

    Args:
        file: The file.
        limit_bytes: How much to read at most; all of it where none is given.

    Raises:
        OSError: It cannot be read, or is no regular file.
    """
    # Without O_NONBLOCK the opening of a pipe would wait for somebody who writes to it.
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(file))
        return stream.read(-1 if limit_bytes is None else limit_bytes)
