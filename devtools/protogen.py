"""Generate the two trees of Python code from ``proto/``.

``sdk/openshell/wire`` holds protobuf and grpc modules for the services; ``sdk/openshell/_messages`` holds betterproto2
types of the public packages. Both compilers run in an empty folder and their output is moved, because they write
``openshell/__init__.py`` and a top-level ``google`` package that must not land on an import path.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
WIRE = ROOT / "sdk" / "openshell" / "wire"
MESSAGES = ROOT / "sdk" / "openshell" / "_messages"

PUBLIC_PACKAGES = ("openshell/v1", "openshell/datamodel/v1", "openshell/sandbox/v1")
"""Folders of ``proto/`` whose messages users see, and which therefore get betterproto2 types."""

_PROJECT_IMPORT = re.compile(r"^(from|import) openshell\.(?!wire\b)", re.MULTILINE)


class GenerationError(RuntimeError):
    """A compiler refused the contracts, or the committed code differs from what they generate."""


def _compile(output: Path, files: list[str], *options: str) -> None:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *options, *files]
    done = subprocess.run(command, cwd=PROTO, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise GenerationError(f"protoc failed for {output.name}: {done.stderr.strip()}")


def _write_wire(scratch: Path, target: Path) -> None:
    files = sorted(path.relative_to(PROTO).as_posix() for path in PROTO.rglob("*.proto"))
    out = str(scratch)
    _compile(scratch, files, f"--python_out={out}", f"--mypy_out=quiet:{out}")
    with_service = [name for name in files if re.search(r"^service ", (PROTO / name).read_text("utf-8"), re.MULTILINE)]
    _compile(scratch, with_service, f"--grpc_python_out={out}", f"--mypy_grpc_out=quiet:{out}")
    shutil.copytree(scratch / "openshell", target)
    for path in sorted(target.rglob("*.py*")):
        path.write_text(_PROJECT_IMPORT.sub(r"\1 openshell.wire.", path.read_text("utf-8")), "utf-8")
    for folder in (target, *(path for path in target.rglob("*") if path.is_dir())):
        package = ".".join(("openshell", *folder.relative_to(target).parts))
        (folder / "__init__.py").write_text(f'"""Generated protobuf and grpc modules of {package}."""\n', "utf-8")


def _write_messages(scratch: Path, target: Path) -> None:
    files = [
        path.relative_to(PROTO).as_posix()
        for package in PUBLIC_PACKAGES
        for path in sorted((PROTO / package).glob("*.proto"))
    ]
    _compile(
        scratch,
        files,
        f"--python_betterproto2_out={scratch}",
        "--python_betterproto2_opt=client_generation=none",
    )
    shutil.copytree(scratch, target)
    (target / "__init__.py").write_text(
        '"""Generated betterproto2 types; the public names are re-exported."""\n', "utf-8"
    )


def generate(wire: Path = WIRE, messages: Path = MESSAGES) -> None:
    """Replace both generated trees.

    Raises:
        GenerationError: A compiler refused the contracts.
    """
    for write, target in ((_write_wire, wire), (_write_messages, messages)):
        with tempfile.TemporaryDirectory(prefix="openshell-protogen-") as folder:
            fresh = Path(folder) / "fresh"
            scratch = Path(folder) / "scratch"
            scratch.mkdir()
            write(scratch, fresh)
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(fresh, target)


def _contents(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def stale_files() -> list[str]:
    """Names of committed generated files that differ from what ``proto/`` generates now."""
    with tempfile.TemporaryDirectory(prefix="openshell-protogen-") as folder:
        wire, messages = Path(folder) / "wire", Path(folder) / "_messages"
        generate(wire, messages)
        stale: list[str] = []
        for committed, fresh in ((WIRE, wire), (MESSAGES, messages)):
            have, want = _contents(committed), _contents(fresh)
            stale += [
                f"{committed.relative_to(ROOT)}/{name}"
                for name in sorted(have.keys() | want.keys())
                if have.get(name) != want.get(name)
            ]
        return stale
