"""Reading, shrinking and resolving ELF binaries."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devtools.images.elf import is_elf, read_elf, resolve_libraries, without_debug
from devtools.images.errors import ElfError

PYTHON = Path(sys.executable).resolve()
DATA = PYTHON.read_bytes()
LOADER = Path(read_elf(DATA).interpreter)


def test_the_interpreter_names_its_loader_and_libc() -> None:
    facts = read_elf(DATA)

    assert Path(facts.interpreter).name.startswith("ld-")
    assert "libc.so.6" in facts.needed


def test_a_library_names_itself() -> None:
    libc = resolve_libraries(LOADER, [PYTHON])["libc.so.6"]

    assert read_elf(libc.read_bytes()).soname == "libc.so.6"


def test_a_text_is_no_elf_file(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("#!/bin/sh\n")

    assert not is_elf(path)
    with pytest.raises(ElfError, match="not a 64-bit"):
        read_elf(path.read_bytes())


@settings(max_examples=60)
@given(st.integers(min_value=0, max_value=4096), st.binary(max_size=64))
def test_a_damaged_file_is_an_error_of_ours_or_is_read(at: int, noise: bytes) -> None:
    damaged = (DATA[:at] + noise + DATA[at + len(noise) :])[: at + 4096]
    with contextlib.suppress(ElfError):
        read_elf(damaged)


def test_a_binary_without_debug_data_still_runs_and_needs_the_same(tmp_path: Path) -> None:
    small = without_debug(DATA)
    path = tmp_path / "python"
    path.write_bytes(small)
    path.chmod(0o755)
    home = Path(sys.base_prefix)
    done = subprocess.run(
        [str(path), "-I", "-S", "-c", "print(6 * 7)"],
        capture_output=True,
        text=True,
        check=False,
        env={"LD_LIBRARY_PATH": str(home / "lib")},
    )

    assert len(small) < len(DATA)
    assert read_elf(small) == read_elf(DATA)
    # It does not find its standard library from here, but it came so far as to look for it.
    assert done.stdout == "42\n" or "encodings" in done.stderr


def test_every_library_is_found_with_what_it_needs_itself() -> None:
    found = resolve_libraries(LOADER, [PYTHON])

    for path in found.values():
        needed = set(read_elf(path.read_bytes()).needed) - {LOADER.name}
        assert needed <= set(found)


def test_a_file_that_the_loader_cannot_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.so"
    path.write_bytes(DATA[:64])

    with pytest.raises(ElfError, match=r"broken\.so"):
        resolve_libraries(LOADER, [path])
