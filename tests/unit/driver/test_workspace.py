"""Workspace roots (compute-driver contract 5.6)."""

from __future__ import annotations

import pytest

from driver_docker.workspace import WorkspaceError, workspace_root


@pytest.mark.parametrize(
    ("working_dir", "volumes", "expected"),
    [
        ("", (), "/sandbox"),
        ("/", (), "/sandbox"),
        ("/sandbox", (), "/sandbox"),
        ("/app", (), "/app"),
        ("/home/agent/work", ("/home/agent/work/cache", "/data"), "/home/agent/work"),
        ("/procurement", (), "/procurement"),
        ("/app", ("/run", "/etc/openshellx", "/.openshellx"), "/app"),
    ],
)
def test_the_images_working_directory_is_the_workspace(
    working_dir: str, volumes: tuple[str, ...], expected: str
) -> None:
    assert workspace_root(working_dir, image_volumes=volumes) == expected


@pytest.mark.parametrize(
    ("working_dir", "volumes"),
    [
        ("app", ()),
        ("/app/../etc", ()),
        ("/app/", ()),
        ("//app", ()),
        ("/proc/self", ()),
        ("/sys", ()),
        ("/dev/shm", ()),
        ("/run/openshell/x", ()),
        ("/run", ()),
        ("/etc/openshell", ()),
        ("/opt", ()),
        ("/.openshell/channel/x", ()),
        ("/.openshell", ()),
        ("/app", ("/app",)),
        ("/app/x", ("/app",)),
        ("", ("/sandbox/",)),
        ("/app\n", ()),
        ("/app", ("/",)),
        ("/app", ("/.openshell/channel",)),
        ("/app", ("/.openshell/runtime/x",)),
        ("/app", ("/run/openshell-supervisor-ca",)),
        ("/app", ("/etc/openshell/",)),
    ],
)
def test_a_directory_that_cannot_be_the_workspace_is_refused(working_dir: str, volumes: tuple[str, ...]) -> None:
    with pytest.raises(WorkspaceError) as refused:
        workspace_root(working_dir, image_volumes=volumes)
    assert refused.value.reason == "WorkspaceValidationFailed"
