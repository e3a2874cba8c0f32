"""From a filesystem policy to Landlock rules.

:func:`plan` is pure over a :class:`PathView`; :func:`establish` carries a plan out.

Landlock only ever allows, on whole trees. So a writable tree that contains something which must not be writable is
taken apart: the tree itself is made readable, and each of its children that is harmless is made writable.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Protocol

from openshell.isolation.errors import cause_of
from openshell.isolation.policy_grammar import is_normal_path
from sandbox_runtime import landlock
from sandbox_runtime.errors import PlatformError, PolicyRefusedError
from sandbox_runtime.landlock import FilesystemAccess, NetworkAccess, Scope

if TYPE_CHECKING:
    from collections.abc import Sequence

PROTECTED_PATHS = ("/.openshell", "/run/openshell-supervisor-ca")
"""Never writable for the agent, whatever the policy says: the runtime, the channel, the authority that it trusts."""

READ_ONLY = FilesystemAccess.EXECUTE | FilesystemAccess.READ_FILE | FilesystemAccess.READ_DIR
"""What a read_only path allows: reading, listing and executing."""


class PathKind(Enum):
    """What Landlock distinguishes."""

    DIRECTORY = "directory"
    FILE = "file"


class Requirement(Enum):
    """How a path that cannot be handled is taken (isolation contract 3.4, ``landlock``)."""

    BEST_EFFORT = "best_effort"
    HARD = "hard_requirement"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedPath:
    """A path without symbolic links, and what is there."""

    path: str
    kind: PathKind


class PathView(Protocol):
    """The questions that planning asks the filesystem."""

    def resolve(self, path: str) -> ResolvedPath | None:
        """Where *path* leads; None when nothing is there.

        Raises:
            OSError: It could not be found out for another reason.
        """

    def children(self, path: str) -> tuple[str, ...]:
        """Names in the directory *path*.

        Raises:
            OSError: It could not be listed.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesystemPolicy:
    """The part of a policy that concerns files."""

    read_only: tuple[str, ...] = ()
    read_write: tuple[str, ...] = ()
    requirement: Requirement = Requirement.HARD


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One allowed tree or file."""

    path: str
    access: FilesystemAccess


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfinementPlan:
    """What the kernel will be told."""

    abi: int
    filesystem: FilesystemAccess
    """Rights that are denied except where a rule allows them."""
    network: NetworkAccess
    """TCP rights that are denied on every port."""
    scopes: Scope
    rules: tuple[Rule, ...]
    missing: tuple[str, ...]
    """Paths of the policy at which nothing exists."""
    notes: tuple[str, ...]
    """Where the agent gets less than the policy's words suggest, and why."""

    @property
    def mechanism(self) -> str:
        """What enforces it, in words for a confirmation."""
        parts = ["filesystem"]
        if Scope.SIGNAL in self.scopes:
            parts.append("signals")
        if Scope.ABSTRACT_UNIX_SOCKET in self.scopes:
            parts.append("abstract sockets")
        if self.network:
            parts.append("TCP")
        return f"Landlock ABI {self.abi} ({', '.join(parts)})"


def read_write_access(abi: int) -> FilesystemAccess:
    """What a read_write path allows: everything but making device nodes."""
    return landlock.handled_filesystem(abi) & ~(FilesystemAccess.MAKE_CHAR | FilesystemAccess.MAKE_BLOCK)


def plan(
    policy: FilesystemPolicy,
    *,
    abi: int,
    view: PathView,
    protected: Sequence[str] = PROTECTED_PATHS,
    deny_tcp: bool = False,
) -> ConfinementPlan:
    """Work out the rules for *policy*.

    Args:
        policy: What the agent may read and write.
        abi: The kernel's Landlock ABI.
        view: The filesystem.
        protected: Trees that are never writable. They need not exist.
        deny_tcp: Deny binding and connecting TCP sockets altogether, the loopback included.

    Raises:
        PlatformError: The ABI is older than the runtime accepts, or cannot deny TCP where that was asked for.
        PolicyRefusedError: The policy cannot be enforced as written.
    """
    if abi < landlock.MINIMUM_ABI:
        found = f"this kernel offers ABI {abi}" if abi else "this kernel offers none, or it is filtered out"
        raise PlatformError(
            f"Landlock ABI {landlock.MINIMUM_ABI} or newer is needed, {found}: use Linux 6.2 or newer with Landlock "
            "enabled and a seccomp profile that lets it through"
        )
    network = NetworkAccess(0)
    if deny_tcp:
        network = landlock.handled_network(abi)
        if not network:
            raise PlatformError(f"denying TCP needs Landlock ABI 4 or newer, this kernel offers ABI {abi}")
    planner = _Planner(policy=policy, abi=abi, view=view, protected=tuple(protected))
    planner.run()
    return ConfinementPlan(
        abi=abi,
        filesystem=landlock.handled_filesystem(abi),
        network=network,
        scopes=landlock.available_scopes(abi),
        rules=tuple(Rule(path=path, access=access) for path, access in sorted(planner.access.items())),
        missing=tuple(planner.missing),
        notes=tuple(planner.notes),
    )


class _Planner:
    def __init__(self, *, policy: FilesystemPolicy, abi: int, view: PathView, protected: tuple[str, ...]) -> None:
        self._policy = policy
        self._view = view
        self._protected = protected
        self._read_write = read_write_access(abi)
        self.access: dict[str, FilesystemAccess] = {}
        self.missing: list[str] = []
        self.notes: list[str] = []

    def run(self) -> None:
        readable = self._resolve_all(self._policy.read_only)
        writable = self._resolve_all(self._policy.read_write)
        for found in readable:
            container = next((other for other in writable if is_within(found.path, other.path)), None)
            if container is not None and container.path != found.path:
                self._cannot(
                    f"read_only path {found.path} lies inside read_write path {container.path}: "
                    "Landlock cannot take a right away again below a writable tree"
                )
            self._allow(found, READ_ONLY)
        for found in writable:
            self._allow_writing(found)

    def _resolve_all(self, paths: Sequence[str]) -> list[ResolvedPath]:
        found = []
        for path in paths:
            if not is_normal_path(path):
                raise PolicyRefusedError(f"policy path {path!r} is not absolute and normalised")
            try:
                resolved = self._view.resolve(path)
            except OSError as error:
                self._cannot(f"policy path {path} cannot be opened: {cause_of(error).lower()}")
                continue
            if resolved is None:
                self.missing.append(path)
            else:
                found.append(resolved)
        return found

    def _cannot(self, words: str) -> None:
        """Something cannot be as the policy has it: refuse or note, as the policy wants."""
        if self._policy.requirement is Requirement.HARD:
            raise PolicyRefusedError(f"{words} (landlock is hard_requirement)")
        self.notes.append(words)

    def _allow(self, found: ResolvedPath, access: FilesystemAccess) -> None:
        if found.kind is PathKind.FILE:
            access &= landlock.FILE_RIGHTS
        self.access[found.path] = self.access.get(found.path, FilesystemAccess(0)) | access

    def _allow_writing(self, found: ResolvedPath) -> None:
        if any(is_within(found.path, guarded) for guarded in self._protected):
            self.notes.append(f"read_write path {found.path} belongs to the sandbox itself and stays read-only")
            self._allow(found, READ_ONLY)
            return
        if found.kind is PathKind.DIRECTORY and any(is_within(guarded, found.path) for guarded in self._protected):
            self.notes.append(
                f"read_write path {found.path} contains parts of the sandbox itself: what is in it now is writable "
                "except for them, but nothing new can be made directly in it"
            )
            self._allow(found, READ_ONLY)
            self._allow_writing_children(found.path)
            return
        self._allow(found, self._read_write)

    def _allow_writing_children(self, folder: str) -> None:
        try:
            names = self._view.children(folder)
        except OSError as error:
            self._cannot(f"policy path {folder} cannot be listed: {cause_of(error).lower()}")
            return
        for name in names:
            path = str(PurePosixPath(folder) / name)
            if any(is_within(path, guarded) for guarded in self._protected):
                continue
            try:
                found = self._view.resolve(path)
            except OSError:
                continue
            if found is None or found.path != path:
                continue  # a dangling or other link: what it leads to is reached by its own name
            if found.kind is PathKind.DIRECTORY and any(is_within(guarded, path) for guarded in self._protected):
                self._allow_writing_children(path)
            else:
                self._allow(found, self._read_write)


def is_within(path: str, folder: str) -> bool:
    """Whether *path* is *folder* or lies below it. Both absolute and normalised."""
    return path == folder or folder == "/" or path.startswith(f"{folder}/")


class RealPaths:
    """The container's own filesystem."""

    def resolve(self, path: str) -> ResolvedPath | None:
        """Where *path* leads; None when nothing is there."""
        try:
            real = os.path.realpath(path, strict=True)
            mode = os.stat(real).st_mode  # noqa: PTH116 - raw names, no Path objects
        except (FileNotFoundError, NotADirectoryError):
            return None
        return ResolvedPath(path=real, kind=PathKind.DIRECTORY if stat.S_ISDIR(mode) else PathKind.FILE)

    def children(self, path: str) -> tuple[str, ...]:
        """Names in the directory *path*."""
        return tuple(sorted(os.listdir(path)))  # noqa: PTH208 - raw names, no Path objects


def establish(planned: ConfinementPlan) -> int:
    """Build the ruleset. Returns its descriptor, which is close-on-exec and the caller's.

    Raises:
        PlatformError: The kernel refused it.
    """
    try:
        ruleset_fd = landlock.create_ruleset(
            abi=planned.abi, filesystem=planned.filesystem, network=planned.network, scopes=planned.scopes
        )
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(os.close, ruleset_fd)
            for rule in planned.rules:
                _allow(ruleset_fd, rule)
            on_failure.pop_all()
    except OSError as error:
        raise PlatformError(f"Landlock refused the ruleset: {error.filename}: {cause_of(error)}") from error
    return ruleset_fd


def _allow(ruleset_fd: int, rule: Rule) -> None:
    try:
        # The last component was resolved already: it must not have become a link since.
        path_fd = os.open(rule.path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return  # gone since the plan was made; nothing is allowed there then
    try:
        landlock.allow_path(ruleset_fd, path_fd, rule.access)
    finally:
        os.close(path_fd)
