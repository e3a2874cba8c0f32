"""Which of the project's own modules a component needs, found by reading their imports.

Only what can be reached goes into an image, so an edit elsewhere in the project changes no image. Imports below
``if TYPE_CHECKING`` do not count. A name that a package loads on first use counts where somebody imports it from there.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectModule:
    """A module of the project.

    Attributes:
        name: Its dotted name.
        path: Its source.
        is_package: Whether it is the ``__init__`` of a package.
    """

    name: str
    path: Path
    is_package: bool

    @property
    def archive_path(self) -> str:
        """Where it lies below a folder of the import path."""
        base = self.name.replace(".", "/")
        return f"{base}/__init__.py" if self.is_package else f"{base}.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Closure:
    """What a component needs.

    Attributes:
        modules: The project's modules, sorted by name.
        foreign: Top-level names of everything else that they import.
    """

    modules: tuple[ProjectModule, ...]
    foreign: frozenset[str]


class ProjectTree:
    """Finds modules in the folders of the project that are on its import path.

    Args:
        roots: Those folders.
        packages: The top-level packages that are the project's own.
    """

    def __init__(self, roots: Sequence[Path], packages: Iterable[str]) -> None:
        self._roots = tuple(roots)
        self._packages = frozenset(packages)

    def find(self, name: str) -> ProjectModule | None:
        """Find a module by its dotted name; None for a name that is none of the project's modules."""
        if name.partition(".")[0] not in self._packages:
            return None
        for root in self._roots:
            base = root.joinpath(*name.split("."))
            if (path := base / "__init__.py").is_file():
                return ProjectModule(name=name, path=path, is_package=True)
            if (path := base.with_name(f"{base.name}.py")).is_file():
                return ProjectModule(name=name, path=path, is_package=False)
        return None

    def package(self, name: str) -> list[ProjectModule]:
        """List all modules of a package, its own included."""
        found = self.find(name)
        if found is None:
            return []
        modules = [found]
        if found.is_package:
            for path in sorted(found.path.parent.iterdir()):
                if path.suffix == ".py" and path.stem != "__init__":
                    modules.append(ProjectModule(name=f"{name}.{path.stem}", path=path, is_package=False))
                elif path.is_dir() and (path / "__init__.py").is_file():
                    modules.extend(self.package(f"{name}.{path.name}"))
        return modules

    def closure(self, roots: Iterable[ProjectModule]) -> Closure:
        """Follow the imports of modules, and of what they import."""
        known: dict[str, ProjectModule] = {}
        foreign: set[str] = set()
        waiting = list(roots)
        while waiting:
            module = waiting.pop()
            if module.name in known:
                continue
            known[module.name] = module
            parts = module.name.split(".")
            wanted = {".".join(parts[:depth]) for depth in range(1, len(parts))}
            imports = imported_names(module)
            wanted.update(imports.required, imports.optional)
            for name in sorted(wanted):
                found = self.find(name) or self._lazy_home(name)
                if found is not None:
                    waiting.append(found)
                elif name.partition(".")[0] not in self._packages and name in imports.required:
                    foreign.add(name.partition(".")[0])
        return Closure(modules=tuple(known[name] for name in sorted(known)), foreign=frozenset(foreign))

    def _lazy_home(self, name: str) -> ProjectModule | None:
        """Find the module that a package's table of lazily loaded names says a name is from."""
        package = self.find(name.rpartition(".")[0])
        if package is None or not package.is_package:
            return None
        wanted = name.rpartition(".")[2]
        for node in ast.walk(ast.parse(package.path.read_bytes(), str(package.path))):
            if not isinstance(node, ast.Dict):
                continue
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == wanted and isinstance(value, ast.Constant):
                    return self.find(str(value.value))
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedNames:
    """What a module imports: modules, their parents, and names that may be submodules.

    Attributes:
        required: Imported without a way out.
        optional: Imported where the failure of it is caught.
    """

    required: frozenset[str]
    optional: frozenset[str]


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _catches_import_errors(node: ast.Try) -> bool:
    caught = {name.id for handler in node.handlers for name in ast.walk(handler) if isinstance(name, ast.Name)}
    return bool(caught & {"ImportError", "ModuleNotFoundError"})


def _imports(node: ast.AST, optional: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node, optional
    elif isinstance(node, ast.If) and _is_type_checking(node.test):
        for statement in node.orelse:
            yield from _imports(statement, optional)
    elif isinstance(node, ast.Try):
        for child in ast.iter_child_nodes(node):
            yield from _imports(child, optional or (_catches_import_errors(node) and child in node.body))
    elif not isinstance(node, ast.expr):
        for child in ast.iter_child_nodes(node):
            yield from _imports(child, optional)


def imported_names(module: ProjectModule) -> ImportedNames:
    """Read what a module imports, at its top and inside of functions."""
    package = module.name if module.is_package else module.name.rpartition(".")[0]
    required: set[str] = set()
    possible: set[str] = set()
    for node, optional in _imports(ast.parse(module.path.read_bytes(), str(module.path)), optional=False):
        names = possible if optional else required
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
            continue
        base = node.module or ""
        if node.level:
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, *([node.module] if node.module else [])])
        names.add(base)
        names.update(f"{base}.{alias.name}" for alias in node.names)
    return ImportedNames(required=frozenset(required), optional=frozenset(possible))
