"""The folder that built layers and archives are kept in.

Nothing in it is ever half written: files are written aside and renamed, and their facts, which are written last, are
what makes them count. One process at a time builds one thing; others wait for it and take its result.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_KEEP_NEWEST = 4
_KEEP_SECONDS = 600.0


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Find the cache: ``$OPENSHELL_CACHE_DIR``, else ``$XDG_CACHE_HOME/openshell-docker``, else below the home."""
    variables = os.environ if environment is None else environment
    if chosen := variables.get("OPENSHELL_CACHE_DIR"):
        return Path(chosen)
    if base := variables.get("XDG_CACHE_HOME"):
        return Path(base) / "openshell-docker"
    return Path.home() / ".cache" / "openshell-docker"


class ArtifactCache:
    """Keeps files by key, each with a few facts about it.

    Args:
        root: The folder; made when missing, for its owner only.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        (root / "locks").mkdir(mode=0o700, exist_ok=True)

    @contextmanager
    def locked(self, name: str, *, shared: bool = False) -> Iterator[IO[bytes]]:
        """Hold a lock of that name; the kernel lets go of it when the process ends in whatever way."""
        with (self.root / "locks" / name).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            yield file

    def find(self, name: str) -> tuple[Path, dict[str, str]] | None:
        """Look up a file that was kept under ``name``, with its facts. None when there is none, or no whole one."""
        path, facts_path = self.root / f"{name}.tar", self.root / f"{name}.json"
        try:
            facts = json.loads(facts_path.read_bytes())
            size = path.stat().st_size
        except (OSError, ValueError):
            return None
        if not isinstance(facts, dict) or facts.get("size_bytes") != str(size):
            return None
        os.utime(path)
        return path, {str(key): str(value) for key, value in facts.items()}

    def make(self, name: str, write: Callable[[Path, Path], Mapping[str, str]]) -> tuple[Path, dict[str, str]]:
        """Find a kept file or write it, once however many processes ask for it at the same time.

        Args:
            name: The file's name, without its suffix.
            write: Writes the file to its first argument and returns its facts; its second is an empty folder to work
                in, removed afterwards.
        """
        if found := self.find(name):
            return found
        with self.locked(name):
            if found := self.find(name):
                return found
            self._sweep()
            scratch = Path(tempfile.mkdtemp(prefix="building-", dir=self.root))
            try:
                with (scratch / "alive").open("wb") as alive:
                    fcntl.flock(alive, fcntl.LOCK_EX)
                    work = scratch / "work"
                    work.mkdir()
                    aside = scratch / "artifact.tar"
                    facts = dict(write(aside, work))
                    facts["size_bytes"] = str(aside.stat().st_size)
                    facts_aside = scratch / "artifact.json"
                    facts_aside.write_text(json.dumps(facts, sort_keys=True), "utf-8")
                    for file in (aside, facts_aside):
                        with file.open("rb") as written:
                            os.fsync(written.fileno())
                    # The facts last: they are what makes the file count.
                    (self.root / f"{name}.json").unlink(missing_ok=True)
                    aside.rename(self.root / f"{name}.tar")
                    facts_aside.rename(self.root / f"{name}.json")
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            return self.root / f"{name}.tar", facts

    def _sweep(self) -> None:
        """Remove working folders whose builder was killed: nobody holds their lock any more."""
        for scratch in self.root.glob("building-*"):
            try:
                with (scratch / "alive").open("rb") as alive:
                    fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(scratch, ignore_errors=True)
            except FileNotFoundError:
                # Its maker is between making the folder and locking it, or it is gone already.
                continue
            except BlockingIOError:
                continue

    def prune(self, prefix: str) -> None:
        """Forget files whose name begins with ``prefix``, save the newest few and those used just now."""
        kept: list[tuple[float, Path]] = []
        for path in self.root.glob(f"{prefix}*.tar"):
            try:
                kept.append((path.stat().st_mtime, path))
            except FileNotFoundError:
                continue
        kept.sort(reverse=True)
        for modified, path in kept[_KEEP_NEWEST:]:
            if time.time() - modified > _KEEP_SECONDS:
                path.with_suffix(".json").unlink(missing_ok=True)
                path.unlink(missing_ok=True)
