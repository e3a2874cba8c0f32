"""A Python interpreter taken from this machine and made to run from one folder of any image.

The tree holds the interpreter, its pruned and compiled standard library, the wheels, every shared library they need and
the loader itself. The interpreter names that loader by its absolute path and searches nothing but its own ``lib``
folder, so the image around it needs no libc, no shell and no Python.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from devtools.images import elf
from devtools.images.archive import Entry
from devtools.images.compiled import Compilation, compile_all
from devtools.images.errors import BuildInputError, ElfError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from devtools.images.progress import ImageProgress
    from devtools.images.wheels import WheelFile

PYTHON_HOME = "/.openshell/runtime/python"
"""Where the tree lies in every image that holds it. The loader's path is written into the interpreter, so a tree works
at this one place only; runtime and supervisor share it, and with it their lowest layer."""


def module_folder(version: str) -> str:
    """Name the folder that everything is imported from.

    Wheels and the project's modules lie beside the standard library. So the path that the interpreter starts with is
    complete, even with ``-I -S``: no start-up code, no environment variable, one folder to look into.

    Args:
        version: The interpreter's, such as ``3.11``.
    """
    return f"{PYTHON_HOME}/lib/python{version}"


_SKIPPED_PACKAGES = frozenset({
    "__phello__", "__pycache__", "config", "curses", "dbm", "dist-packages", "distutils", "ensurepip", "idlelib",
    "lib-dynload", "lib2to3", "msilib", "pydoc_data", "site-packages", "sqlite3", "test", "tests", "tkinter",
    "turtledemo", "unittest", "venv", "wsgiref", "xmlrpc",
})  # fmt: skip
_SKIPPED_MODULES = frozenset({
    "_pydecimal", "_pyio", "antigravity", "cProfile", "cgi", "cgitb", "doctest", "imaplib", "mailbox", "nntplib",
    "pdb", "poplib", "profile", "pydoc", "sitecustomize", "smtpd", "telnetlib", "this", "turtle",
})  # fmt: skip
_SKIPPED_EXTENSIONS = frozenset({
    "_codecs_cn", "_codecs_hk", "_codecs_iso2022", "_codecs_jp", "_codecs_kr", "_codecs_tw", "_crypt", "_ctypes_test",
    "_curses", "_curses_panel", "_dbm", "_gdbm", "_multibytecodec", "_sqlite3", "_testbuffer", "_testcapi",
    "_testclinic", "_testimportmultiple", "_testinternalcapi", "_testmultiphase", "_testsinglephase", "_tkinter",
    "_xxtestfuzz", "audioop", "nis", "ossaudiodev", "readline", "spwd", "xxlimited", "xxlimited_35",
})  # fmt: skip

_LOADED_BY_NAME = ("libgcc_s.so.1",)
"""Libraries that the C library opens by name (to end a thread), so that nobody's NEEDED list shows them."""

_NOWHERE = (b"/dev/null/", b"/proc/0x")
"""A path that begins so never exists, whatever an image holds: ``/dev/null`` is no folder, and no process has number 0.
"""

_OPENSSL_FOLDER = re.compile(rb'OPENSSLDIR: "([^"\0]+)"')
"""What each copy of OpenSSL says about where its configuration lies."""

_PROBE = """
import json, os, sys, sysconfig
facts = {
    "executable": os.path.realpath(sys.executable),
    "version": list(sys.version_info[:2]),
    "build": sys.version,
    "stdlib": sysconfig.get_path("stdlib"),
    "extensions": sysconfig.get_config_var("DESTSHARED") or "",
}
print(json.dumps(facts))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A Python on this machine.

    Attributes:
        executable: Its binary, links followed.
        version: For example ``3.11``.
        build: What ``sys.version`` says: version, build date, compiler.
        stdlib: Its standard library.
        extensions: The folder of its extension modules.
    """

    executable: Path
    version: str
    build: str
    stdlib: Path
    extensions: Path

    @property
    def identity(self) -> str:
        """A digest of what of this interpreter and its C library goes into an image."""
        digest = hashlib.sha256(self.build.encode())
        loader = Path(elf.read_elf(self.executable.read_bytes()).interpreter)
        libraries = elf.resolve_libraries(loader, [self.executable])
        for path in (self.executable, loader, *(libraries[name] for name in sorted(libraries))):
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()


def inspect_interpreter(python: Path) -> Interpreter:
    """Ask a Python about itself; a virtual environment's answers for the Python it was made from.

    Raises:
        BuildInputError: when it does not run, or its standard library is not whole.
    """
    try:
        done = subprocess.run([str(python), "-I", "-c", _PROBE], capture_output=True, text=True, check=True)
        facts = json.loads(done.stdout)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        raise BuildInputError(f"{python} does not run, so no image can be made from it: {error}") from error
    major, minor = facts["version"]
    stdlib = Path(facts["stdlib"])
    extensions = Path(facts["extensions"])
    if not extensions.is_dir():
        extensions = stdlib / "lib-dynload"
    if not (stdlib / "asyncio" / "__init__.py").is_file():
        raise BuildInputError(
            f"the standard library of {python} is not whole ({stdlib} has no asyncio); "
            f"on Debian, install libpython{major}.{minor}-stdlib"
        )
    return Interpreter(
        executable=Path(facts["executable"]),
        version=f"{major}.{minor}",
        build=facts["build"],
        stdlib=stdlib,
        extensions=extensions,
    )


def _standard_library(interpreter: Interpreter) -> Iterator[tuple[Path, PurePosixPath]]:
    """Walk over the sources of the standard library that go into an image."""
    for folder, names, files in os.walk(interpreter.stdlib):
        here = Path(folder)
        relative = PurePosixPath(here.relative_to(interpreter.stdlib).as_posix())
        names[:] = sorted(name for name in names if name not in _SKIPPED_PACKAGES and not name.startswith("config-"))
        for name in sorted(files):
            if name.endswith(".py") and not (here == interpreter.stdlib and name[:-3] in _SKIPPED_MODULES):
                yield here / name, relative / name


class _Relocation:
    """Lays out one tree in a folder; what is unlike is kept apart in methods, what is shared in attributes."""

    def __init__(self, interpreter: Interpreter, home: str, work: Path) -> None:
        self.interpreter = interpreter
        self.home = home
        self.root = work / "tree"
        self.libraries = self.root / "lib"
        self.modules = self.root / "lib" / f"python{interpreter.version}"
        self.loader = Path(elf.read_elf(interpreter.executable.read_bytes()).interpreter)
        if not self.loader.name:
            raise ElfError(f"{interpreter.executable} names no loader: a static Python cannot load extension modules")
        self.jobs: list[Compilation] = []
        self.binaries: list[Path] = []
        for folder in (self.root / "bin", self.libraries, self.modules / "lib-dynload"):
            folder.mkdir(parents=True, exist_ok=True)

    def copy_binary(self, source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(elf.without_debug(source.read_bytes()))

    def add_source(self, source: Path, relative: PurePosixPath) -> None:
        target = self.modules / relative.with_suffix(".pyc")
        target.parent.mkdir(parents=True, exist_ok=True)
        shown = f"{self.home}/{target.parent.relative_to(self.root).as_posix()}/{relative.name}"
        self.jobs.append(Compilation(source=source, target=target, shown=shown))

    def add_standard_library(self) -> None:
        for source, relative in _standard_library(self.interpreter):
            self.add_source(source, relative)
        for source in sorted(self.interpreter.extensions.glob("*.so")):
            if source.name.partition(".")[0] not in _SKIPPED_EXTENSIONS:
                target = self.modules / "lib-dynload" / source.name
                self.copy_binary(source, target)
                self.binaries.append(source)
        license_text = self.interpreter.stdlib / "LICENSE.txt"
        if license_text.is_file():
            shutil.copyfile(license_text, self.modules / "LICENSE.txt")

    def add_wheels(self, files: Iterable[WheelFile]) -> None:
        for file in files:
            if file.relative.suffix == ".py":
                self.add_source(file.source, file.relative)
                continue
            target = self.modules / file.relative
            if ".so" in file.relative.suffixes and elf.is_elf(file.source):
                self.copy_binary(file.source, target)
                self.binaries.append(file.source)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file.source, target)

    def add_libraries(self) -> None:
        executable = self.interpreter.executable
        found = elf.resolve_libraries(self.loader, [executable, *self.binaries])
        libc = found.get("libc.so.6")
        for name in _LOADED_BY_NAME:
            for folder in () if libc is None else (libc.parent, Path("/lib"), Path("/usr/lib")):
                if name not in found and (folder / name).is_file():
                    found[name] = folder / name
        for name, source in sorted(found.items()):
            self.copy_binary(source, self.libraries / name)
        # The loader is copied whole: nothing of it may be moved by a tool.
        shutil.copyfile(self.loader, self.libraries / self.loader.name)
        self.copy_binary(executable, self.root / "bin" / "python3")

    def point_inwards(self) -> None:
        """Make every binary find its libraries in the tree and nowhere else."""
        python = self.root / "bin" / "python3"
        elf.patch(
            python,
            "--set-interpreter", f"{self.home}/lib/{self.loader.name}",
            "--force-rpath", "--set-rpath", f"{self.home}/lib",
        )  # fmt: skip
        for path in sorted(self.root.rglob("*")):
            if path == python or not path.is_file() or ".so" not in path.suffixes or not elf.is_elf(path):
                continue
            # A RUNPATH of its own would make the loader ignore the interpreter's.
            if elf.read_elf(path.read_bytes()).search_path:
                elf.patch(path, "--remove-rpath")

    def ignore_the_image(self) -> None:
        """Make loader and OpenSSL blind for files of the surrounding image that could load code into us."""
        loader = self.libraries / self.loader.name
        loader.write_bytes(blinded(loader.read_bytes(), b"/etc/ld.so.preload", b"/etc/ld.so.cache"))
        for path in self.root.rglob("*.so*"):
            data = path.read_bytes()
            if folders := set(_OPENSSL_FOLDER.findall(data)):
                path.write_bytes(blinded(data, *folders))


def blinded(data: bytes, *names: bytes) -> bytes:
    """Replace path names in a binary by others of the same length that never exist.

    Raises:
        ElfError: when a name is too short for that.
    """
    for name in names:
        nowhere = next((prefix for prefix in _NOWHERE if len(prefix) <= len(name)), None)
        if nowhere is None:
            raise ElfError(f"the path {name.decode(errors='replace')} in a binary is too short to be replaced")
        data = data.replace(name, nowhere.ljust(len(name), b"x"))
    return data


def relocate(
    interpreter: Interpreter, wheels: Iterable[WheelFile], work: Path, progress: ImageProgress, home: str = PYTHON_HOME
) -> list[Entry]:
    """Make a tree that runs in any image.

    Args:
        interpreter: The Python to take.
        wheels: Files of the wheels that go in.
        work: An empty folder for the tree; it must live until the entries were read.
        progress: Is told of every compiled file.
        home: Where the tree will lie.

    Returns:
        The tree's entries, root's and read-only.

    Raises:
        BuildInputError: when a source does not compile.
        ElfError: when a binary or a library it needs is not usable.
    """
    tree = _Relocation(interpreter, home, work)
    tree.add_standard_library()
    tree.add_wheels(wheels)
    step = f"compile Python {interpreter.version} and wheels"
    progress.started(step, len(tree.jobs))
    compile_all(interpreter.executable, tree.jobs, lambda amount: progress.advanced(step, amount))
    progress.finished(step)
    tree.add_libraries()
    tree.point_inwards()
    tree.ignore_the_image()
    entries: list[Entry] = []
    for path in sorted(tree.root.rglob("*")):
        if path.is_file():
            relative = path.relative_to(tree.root)
            executable = relative.parts[0] == "bin" or path.name == tree.loader.name
            name = f"{home}/{relative.as_posix()}".removeprefix("/")
            entries.append(Entry(path=name, mode=0o555 if executable else 0o444, source=path))
    return entries
