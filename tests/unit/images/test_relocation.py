"""The relocated interpreter: everything it needs is in its own folder."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from devtools.images.archive import Entry
from devtools.images.elf import ElfFacts, is_elf, read_elf
from devtools.images.errors import BuildInputError, ElfError
from devtools.images.interpreter import PYTHON_HOME, Interpreter, blinded, inspect_interpreter, relocate
from devtools.images.progress import SilentProgress
from devtools.images.wheels import wheel_files

SITE_PACKAGES = Path(importlib.util.find_spec("grpc").origin).parents[1]  # type: ignore[union-attr,arg-type]  # installed
HOME = PYTHON_HOME.removeprefix("/")


def interpreters() -> list[Path]:
    """The interpreter of this environment and, where it is another one and whole, the distribution's."""
    own = Path(sys.executable)
    found = [own]
    distribution = Path("/usr/bin/python3")
    if distribution.exists() and distribution.resolve() != own.resolve():
        try:
            inspect_interpreter(distribution)
        except BuildInputError:
            return found
        found.append(distribution)
    return found


class Tree:
    """A relocated interpreter and what its files say of themselves."""

    def __init__(self, interpreter: Interpreter, entries: list[Entry]) -> None:
        self.interpreter = interpreter
        self.entries = {entry.path: entry for entry in entries}
        self.binaries: dict[str, ElfFacts] = {
            entry.path: read_elf(entry.source.read_bytes())
            for entry in entries
            if entry.source is not None and is_elf(entry.source)
        }


@pytest.fixture(scope="module", params=interpreters(), ids=str)
def tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    interpreter = inspect_interpreter(request.param)
    work = tmp_path_factory.mktemp("tree")
    return Tree(interpreter, relocate(interpreter, wheel_files(SITE_PACKAGES), work, SilentProgress()))


def test_every_needed_library_lies_in_the_tree(tree: Tree) -> None:
    libraries = {Path(path).name for path in tree.entries if Path(path).parent.as_posix() == f"{HOME}/lib"}
    missing = {(path, name) for path, facts in tree.binaries.items() for name in facts.needed if name not in libraries}

    assert len(tree.binaries) > 30
    assert missing == set()


def test_the_interpreter_names_the_loader_and_the_libraries_of_the_tree(tree: Tree) -> None:
    facts = tree.binaries[f"{HOME}/bin/python3"]

    assert facts.interpreter.removeprefix("/") in tree.entries
    assert facts.search_path == f"{PYTHON_HOME}/lib"


def test_no_library_searches_anywhere_else(tree: Tree) -> None:
    elsewhere = {
        path: facts.search_path
        for path, facts in tree.binaries.items()
        if facts.search_path and not path.endswith("bin/python3")
    }

    assert elsewhere == {}


def test_the_loader_looks_at_no_file_of_the_image_around_it(tree: Tree) -> None:
    loader = tree.entries[tree.binaries[f"{HOME}/bin/python3"].interpreter.removeprefix("/")].source
    assert loader is not None

    assert b"/etc/ld.so." not in loader.read_bytes()


def test_no_copy_of_openssl_reads_a_configuration_of_the_image_around_it(tree: Tree) -> None:
    folders = {
        folder.decode()
        for path in tree.binaries
        if (source := tree.entries[path].source) is not None
        for folder in re.findall(rb'OPENSSLDIR: "([^"]*)"', source.read_bytes())
    }

    assert folders
    assert {folder for folder in folders if not folder.startswith(("/dev/null/", "/proc/0"))} == set()


@pytest.mark.parametrize(
    ("name", "replaced"),
    [(b"/usr/lib/ssl", b"/dev/null/xx"), (b"/etc/ssl", b"/proc/0x"), (b"/opt/ssl/", b"/proc/0xx")],
)
def test_a_path_is_replaced_by_one_of_the_same_length(name: bytes, replaced: bytes) -> None:
    assert blinded(b"a\0" + name + b"/cert\0" + name + b"\0", name) == b"a\0" + replaced + b"/cert\0" + replaced + b"\0"


def test_a_path_that_is_too_short_is_refused() -> None:
    with pytest.raises(ElfError, match="/a in a binary is too short"):
        blinded(b"/a", b"/a")


def test_everything_is_read_only_and_roots(tree: Tree) -> None:
    assert {entry.mode for entry in tree.entries.values()} == {0o444, 0o555}
    assert {(entry.uid, entry.gid) for entry in tree.entries.values()} == {(0, 0)}
    assert [path for path, entry in tree.entries.items() if entry.mode == 0o555 and "/bin/" in path]


def test_only_compiled_modules_are_shipped_and_no_tests(tree: Tree) -> None:
    assert not [path for path in tree.entries if path.endswith((".py", ".pyi", ".h", ".a"))]
    assert not [path for path in tree.entries if "/test/" in path or "/tests/" in path or "tkinter" in path]


def test_compiled_modules_are_never_compared_with_a_source(tree: Tree) -> None:
    flags = {
        entry.source.read_bytes()[4]
        for path, entry in tree.entries.items()
        if path.endswith(".pyc") and entry.source is not None
    }

    assert flags == {0b01}


def test_tracebacks_name_files_of_the_tree(tree: Tree) -> None:
    entry = tree.entries[f"{HOME}/lib/python{tree.interpreter.version}/json/decoder.pyc"]
    assert entry.source is not None

    assert f"{PYTHON_HOME}/lib/python{tree.interpreter.version}/json/decoder.py".encode() in entry.source.read_bytes()


def test_it_fits_into_eighty_megabytes(tree: Tree) -> None:
    total = sum(entry.source.stat().st_size for entry in tree.entries.values() if entry.source is not None)

    assert 20_000_000 < total < 80_000_000


@pytest.mark.skipif(shutil.which("true") is None, reason="needs a program that is no Python")
def test_a_program_that_is_no_python_is_refused() -> None:
    with pytest.raises(BuildInputError, match="does not run, so no image can be made from it"):
        inspect_interpreter(Path(str(shutil.which("true"))))


def test_the_answers_of_a_virtual_environment_are_those_of_its_base() -> None:
    interpreter = inspect_interpreter(Path(sys.executable))

    assert interpreter.executable == Path(sys.executable).resolve()
    assert interpreter.stdlib.is_relative_to(sys.base_prefix)


def test_a_source_that_does_not_compile_is_named(tmp_path: Path) -> None:
    from devtools.images.compiled import Compilation, compile_all

    (tmp_path / "bad.py").write_text("def broken(:\n")
    job = Compilation(source=tmp_path / "bad.py", target=tmp_path / "bad.pyc", shown="/shown/bad.py")

    with pytest.raises(BuildInputError, match=r"/shown/bad\.py"):
        compile_all(Path(sys.executable), [job], lambda _amount: None)


def test_compiling_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    from devtools.images.compiled import Compilation, compile_all

    source = Path(subprocess.__file__)
    for name in ("one", "two"):
        job = Compilation(source=source, target=tmp_path / name, shown="/shown/subprocess.py")
        compile_all(Path(sys.executable), [job], lambda _amount: None)

    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
