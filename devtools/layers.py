"""Which room of the house may import which: the directions of the design, checked on the syntax trees."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

ROOM_FOLDERS: dict[str, str] = {
    "openshell": "sdk/openshell",
    "driver_docker": "driver_docker",
    "gateway_embedded": "gateway_embedded",
    "supervisor_reference": "supervisor_reference",
    "sandbox_runtime": "sandbox_runtime",
    "examples": "examples",
}
"""Import name of each guarded room, and its folder."""

PROJECT_PACKAGES = frozenset({*ROOM_FOLDERS, "devtools", "benchmarks", "tests", "images"})

ALLOWED: dict[str, tuple[str, ...]] = {
    "openshell": ("openshell",),
    "driver_docker": (
        "driver_docker",
        "openshell.wire",
        "openshell.verdicts",
        "openshell.isolation",
        "openshell.ready_line",
        "openshell.status",
    ),
    "gateway_embedded": ("gateway_embedded", "openshell"),
    "supervisor_reference": ("supervisor_reference", "openshell"),
    "sandbox_runtime": ("sandbox_runtime", "openshell.isolation", "openshell.wire", "openshell.status"),
    "examples": ("examples", "openshell"),
}
"""Prefixes of project modules that a room may import."""

BOOTSTRAP_MODULES = ("console", "debian", "environment", "errors", "interruption", "kernel")
"""Modules of ``devtools`` that run before there is a virtual environment: standard library only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One import that goes against the directions."""

    path: str
    line: int
    module: str
    why: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: imports {self.module}: {self.why}"


def _package_of(path: Path, folder: Path, package: str) -> str:
    parts = path.relative_to(folder).with_suffix("").parts[:-1]
    return ".".join((package, *parts))


def imported_modules(source: str, package: str) -> list[tuple[int, str]]:
    """Every module that a file imports, with its line; relative imports are resolved against ``package``.

    ``from a import b`` counts as ``a.b``, since ``b`` may be a module.
    """
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join((*parents, base)) if base else ".".join(parents)
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def _is_within(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def why_forbidden(room: str, module: str) -> str | None:
    """Why a room may not import a module, or ``None`` where it may."""
    if module.partition(".")[0] not in PROJECT_PACKAGES:
        return None
    if not _is_within(module, ALLOWED[room]):
        return f"{room} may import only {', '.join(ALLOWED[room])}"
    if room == "examples" and module.startswith("openshell.") and any(p.startswith("_") for p in module.split(".")):
        return "an example uses the public API only"
    return None


def violations(root: Path) -> list[Violation]:
    """Every import of the repository that goes against the directions."""
    found: list[Violation] = []
    for room, folder_name in ROOM_FOLDERS.items():
        folder = root / folder_name
        for path in sorted(folder.rglob("*.py")):
            imports = imported_modules(path.read_text("utf-8"), _package_of(path, folder, room))
            for line, module in imports:
                why = why_forbidden(room, module)
                if why is not None:
                    found.append(Violation(path=path.relative_to(root).as_posix(), line=line, module=module, why=why))
    for name in BOOTSTRAP_MODULES:
        path = root / "devtools" / f"{name}.py"
        for line, module in imported_modules(path.read_text("utf-8"), "devtools"):
            top, second = [*module.split("."), ""][:2]
            if top not in sys.stdlib_module_names and (top != "devtools" or second not in BOOTSTRAP_MODULES):
                why = "runs before there is a virtual environment"
                found.append(Violation(path=f"devtools/{name}.py", line=line, module=module, why=why))
    return found
