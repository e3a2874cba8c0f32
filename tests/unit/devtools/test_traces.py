from __future__ import annotations

from pathlib import Path

import pytest

from devtools.traces import traces_in

ROOT = Path("/srv/project")


@pytest.mark.parametrize(
    ("line", "is_trace"),
    [
        ("path = '/srv/project/devtools'", True),
        ("cd /home/" + "somebody/x", True),
        ("cat /root/" + ".ssh", True),
        ("https://py" + "pi.org/simple", True),
        ("the account's home is /home/sandbox/", False),
        ("a container's /srv/ and /home/a", False),
        ("~/.config/openshell", False),
        ("/var/run/docker.sock", False),
        ("a relative/root/name", False),
    ],
)
def test_only_what_belongs_to_one_machine_is_a_trace(line: str, is_trace: bool) -> None:
    assert bool(traces_in(line, ROOT)) == is_trace


def test_the_line_is_named() -> None:
    assert traces_in("a\nb /srv/project/c\n", ROOT) == [(2, "path of this machine: /srv/project/")]


def test_a_repository_at_the_top_does_not_make_its_name_a_trace() -> None:
    assert traces_in("mount at /app/data", Path("/app")) == []
