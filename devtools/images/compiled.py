"""Compile Python sources ahead, with the interpreter that will run them.

The tree is read-only and its files have no meaningful times, so the compiled files are of the "unchecked hash" kind:
they are loaded without a look at their source.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from devtools.images.errors import BuildInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_WORKERS = 2
"""Fixed, since what one process compiled before has an influence on a compiled file's bytes."""

_PROGRAM = """
import py_compile, sys
for line in sys.stdin:
    source, target, shown = line.rstrip("\\n").split("\\0")
    py_compile.compile(source, target, shown, doraise=True,
                       invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    print(flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """One file to compile.

    Attributes:
        source: The Python source.
        target: The compiled file to write; its folder exists.
        shown: The name that tracebacks print.
    """

    source: Path
    target: Path
    shown: str


def compile_all(interpreter: Path, jobs: Sequence[Compilation], advanced: Callable[[int], None]) -> None:
    """Compile files.

    Args:
        interpreter: The Python that will run them.
        jobs: What to compile.
        advanced: Is told each time that so many more files are done.

    Raises:
        BuildInputError: when a source does not compile.
    """
    environment = {"PYTHONHASHSEED": "0", "PATH": os.defpath, "LC_ALL": "C.UTF-8"}
    workers: list[tuple[subprocess.Popen[str], str]] = []
    try:
        for index in range(_WORKERS):
            lines = "".join(f"{job.source}\0{job.target}\0{job.shown}\n" for job in jobs[index::_WORKERS])
            process = subprocess.Popen(
                [str(interpreter), "-S", "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            workers.append((process, lines))
        for process, lines in workers:
            # A worker answers a byte a file, far less than a pipe holds before the last line is written here.
            stdin = _opened(process.stdin)
            with contextlib.suppress(BrokenPipeError):
                stdin.write(lines)
                stdin.close()
        for process, _ in workers:
            for _line in _opened(process.stdout):
                advanced(1)
            text = _opened(process.stderr).read().strip()
            if process.wait() != 0:
                raise BuildInputError(f"a Python source for the images does not compile: {text}")
    finally:
        for process, _ in workers:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                with contextlib.suppress(BrokenPipeError):
                    _opened(stream).close()


def _opened(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise ValueError("the worker was started without a pipe")
    return stream
