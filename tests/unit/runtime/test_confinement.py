"""From policy to rules, without a kernel."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openshell.isolation.policy_grammar import is_normal_path
from sandbox_runtime.confinement import (
    READ_ONLY,
    FilesystemPolicy,
    PathKind,
    Requirement,
    ResolvedPath,
    is_within,
    plan,
    read_write_access,
)
from sandbox_runtime.errors import PlatformError, PolicyRefusedError
from sandbox_runtime.landlock import FILE_RIGHTS, FilesystemAccess, NetworkAccess, Scope, handled_filesystem

READ_WRITE = read_write_access(7)


@dataclass
class FakePaths:
    """A filesystem of folders, files, links and paths that cannot be opened."""

    folders: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    links: dict[str, str] = field(default_factory=dict)
    closed: tuple[str, ...] = ()

    def resolve(self, path: str) -> ResolvedPath | None:
        path = self.links.get(path.rstrip("/") or "/", path.rstrip("/") or "/")
        if path in self.closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        if path in self.files:
            return ResolvedPath(path=path, kind=PathKind.FILE)
        if path in self.folders:
            return ResolvedPath(path=path, kind=PathKind.DIRECTORY)
        return None

    def children(self, path: str) -> tuple[str, ...]:
        prefix = path.rstrip("/") + "/"
        names = [
            name.removeprefix(prefix) for name in (*self.folders, *self.files, *self.links) if name.startswith(prefix)
        ]
        return tuple(sorted({name for name in names if name and "/" not in name}))


IMAGE = FakePaths(
    folders=(
        "/",
        "/usr",
        "/usr/bin",
        "/sandbox",
        "/sandbox/data",
        "/dev",
        "/run",
        "/run/openshell-supervisor-ca",
        "/run/lock",
        "/.openshell",
        "/.openshell/channel",
        "/.openshell/runtime",
    ),
    files=("/dev/null", "/usr/bin/tool"),
    links={"/bin": "/usr/bin", "/sneaky": "/.openshell/channel"},
)


def rules(policy: FilesystemPolicy, view: FakePaths = IMAGE, abi: int = 7) -> dict[str, FilesystemAccess]:
    return {rule.path: rule.access for rule in plan(policy, abi=abi, view=view).rules}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (FilesystemPolicy(), {}),
        (FilesystemPolicy(read_only=("/usr",)), {"/usr": READ_ONLY}),
        (FilesystemPolicy(read_write=("/sandbox",)), {"/sandbox": READ_WRITE}),
        (FilesystemPolicy(read_only=("/sandbox",), read_write=("/sandbox/",)), {"/sandbox": READ_WRITE}),
        (FilesystemPolicy(read_only=("/bin",)), {"/usr/bin": READ_ONLY}),
        (FilesystemPolicy(read_write=("/dev/null",)), {"/dev/null": READ_WRITE & FILE_RIGHTS}),
        (FilesystemPolicy(read_only=("/usr/bin/tool",)), {"/usr/bin/tool": READ_ONLY & FILE_RIGHTS}),
        (
            FilesystemPolicy(read_only=("/usr",), read_write=("/usr/bin",)),
            {"/usr": READ_ONLY, "/usr/bin": READ_WRITE},
        ),
        (FilesystemPolicy(read_only=("/lib64", "/usr")), {"/usr": READ_ONLY}),
        # what belongs to the sandbox itself
        (FilesystemPolicy(read_write=("/.openshell/runtime",)), {"/.openshell/runtime": READ_ONLY}),
        (FilesystemPolicy(read_write=("/sneaky",)), {"/.openshell/channel": READ_ONLY}),
        (FilesystemPolicy(read_write=("/run",)), {"/run": READ_ONLY, "/run/lock": READ_WRITE}),
        (
            FilesystemPolicy(read_write=("/",)),
            {
                "/": READ_ONLY,
                "/dev": READ_WRITE,
                "/run/lock": READ_WRITE,
                "/sandbox": READ_WRITE,
                "/usr": READ_WRITE,
            },
        ),
    ],
)
def test_rules(policy: FilesystemPolicy, expected: dict[str, FilesystemAccess]) -> None:
    assert rules(policy) == expected


def test_missing_paths_are_named_and_allow_nothing() -> None:
    planned = plan(FilesystemPolicy(read_only=("/lib64",), read_write=("/data",)), abi=7, view=IMAGE)
    assert planned.missing == ("/lib64", "/data")
    assert planned.rules == ()


def test_less_than_the_policy_says_is_noted() -> None:
    planned = plan(FilesystemPolicy(read_write=("/", "/.openshell")), abi=7, view=IMAGE)
    assert len(planned.notes) == 2
    assert "/.openshell" in planned.notes[1]


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (FilesystemPolicy(read_only=("/sandbox/data",), read_write=("/sandbox",)), "/sandbox/data"),
        (FilesystemPolicy(read_only=("/locked",)), "permission denied"),
    ],
)
def test_what_cannot_be_enforced_is_refused_or_noted_as_the_policy_wants(policy: FilesystemPolicy, words: str) -> None:
    view = FakePaths(folders=IMAGE.folders, closed=("/locked",))
    with pytest.raises(PolicyRefusedError, match=words):
        plan(policy, abi=7, view=view)
    lenient = FilesystemPolicy(
        read_only=policy.read_only, read_write=policy.read_write, requirement=Requirement.BEST_EFFORT
    )
    assert words in plan(lenient, abi=7, view=view).notes[0]


@pytest.mark.parametrize("path", ["usr", "", "/usr/../etc", "/usr//bin", "/./usr", "/a\0b"])
def test_paths_that_are_not_absolute_and_normal_are_refused(path: str) -> None:
    assert not is_normal_path(path)
    with pytest.raises(PolicyRefusedError):
        plan(FilesystemPolicy(read_only=(path,), requirement=Requirement.BEST_EFFORT), abi=7, view=IMAGE)


@pytest.mark.parametrize("abi", [0, 1, 2])
def test_an_old_kernel_is_refused_whatever_the_policy_wants(abi: int) -> None:
    with pytest.raises(PlatformError, match="Landlock ABI 3"):
        plan(FilesystemPolicy(requirement=Requirement.BEST_EFFORT), abi=abi, view=IMAGE)


@pytest.mark.parametrize(
    ("abi", "ioctl", "scopes"),
    [
        (3, False, Scope(0)),
        (4, False, Scope(0)),
        (5, True, Scope(0)),
        (6, True, Scope.SIGNAL | Scope.ABSTRACT_UNIX_SOCKET),
        (7, True, Scope.SIGNAL | Scope.ABSTRACT_UNIX_SOCKET),
    ],
)
def test_everything_that_the_kernel_knows_is_handled(abi: int, ioctl: bool, scopes: Scope) -> None:
    planned = plan(FilesystemPolicy(read_write=("/sandbox",)), abi=abi, view=IMAGE)
    assert planned.filesystem == handled_filesystem(abi)
    assert (FilesystemAccess.IOCTL_DEV in planned.filesystem) is ioctl
    assert planned.scopes == scopes
    assert planned.network == 0
    assert f"ABI {abi}" in planned.mechanism
    assert ("signals" in planned.mechanism) is bool(scopes)
    assert all(rule.access in planned.filesystem for rule in planned.rules)


def test_device_nodes_can_never_be_made() -> None:
    assert not READ_WRITE & (FilesystemAccess.MAKE_CHAR | FilesystemAccess.MAKE_BLOCK)


def test_tcp_is_denied_where_asked_and_refused_where_impossible() -> None:
    planned = plan(FilesystemPolicy(), abi=4, view=IMAGE, deny_tcp=True)
    assert planned.network == NetworkAccess.BIND_TCP | NetworkAccess.CONNECT_TCP
    assert "TCP" in planned.mechanism
    with pytest.raises(PlatformError):
        plan(FilesystemPolicy(), abi=3, view=IMAGE, deny_tcp=True)


PATHS = st.sampled_from((*IMAGE.folders, *IMAGE.files, *IMAGE.links, "/missing"))


@given(read_only=st.lists(PATHS), read_write=st.lists(PATHS))
def test_the_sandbox_itself_is_never_writable(read_only: list[str], read_write: list[str]) -> None:
    policy = FilesystemPolicy(
        read_only=tuple(read_only), read_write=tuple(read_write), requirement=Requirement.BEST_EFFORT
    )
    for path, access in rules(policy).items():
        for guarded in ("/.openshell", "/run/openshell-supervisor-ca"):
            if is_within(path, guarded) or is_within(guarded, path):
                assert access & ~READ_ONLY == 0
