"""What PID 1 makes of what the kernel says about it."""

from __future__ import annotations

import pytest

from sandbox_runtime.errors import PlatformError
from sandbox_runtime.hardening import (
    foreign_interfaces,
    identity_objections,
    parse_status,
    privilege_objections,
)

STATUS = """Name:\tpython3
Umask:\t0022
Uid:\t1000\t1000\t1000\t1000
Gid:\t1000\t1000\t1000\t1000
Groups:\t1000 1200
CapInh:\t0000000000000000
CapPrm:\t0000000000000000
CapEff:\t0000000000000000
CapBnd:\t0000000000000000
CapAmb:\t0000000000000000
NoNewPrivs:\t1
Seccomp:\t2
"""


def test_the_floor_has_no_objection() -> None:
    facts = parse_status(STATUS)
    assert privilege_objections(facts) == ()
    assert identity_objections(facts, uid=1000, gid=1000, supplementary_gids=(1200,)) == ()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("Uid:\t1000\t1000", "Uid:\t1000\t0", "uid 0"),
        ("Gid:\t1000", "Gid:\t0", "group 0"),
        ("Groups:\t1000", "Groups:\t0", "group 0"),
        ("CapBnd:\t0000000000000000", "CapBnd:\t00000000a80425fb", "CapBnd"),
        ("CapEff:\t0000000000000000", "CapEff:\t0000000000000001", "CapEff"),
        ("NoNewPrivs:\t1", "NoNewPrivs:\t0", "no_new_privs"),
        ("Seccomp:\t2", "Seccomp:\t0", "seccomp"),
    ],
)
def test_each_privilege_too_many_is_named(old: str, new: str, words: str) -> None:
    (objection,) = privilege_objections(parse_status(STATUS.replace(old, new)))
    assert words in objection


@pytest.mark.parametrize(
    ("uid", "gid", "groups", "words"),
    [
        (1001, 1000, (1200,), "uid is 1000, not 1001"),
        (1000, 1001, (1000, 1200), "gid is 1000, not 1001"),
        (1000, 1000, (), "supplementary groups are 1200, not none"),
        (1000, 1000, (1200, 1300), "supplementary groups are 1200, not 1200, 1300"),
    ],
)
def test_each_difference_from_the_promised_identity_is_named(
    uid: int, gid: int, groups: tuple[int, ...], words: str
) -> None:
    assert identity_objections(parse_status(STATUS), uid=uid, gid=gid, supplementary_gids=groups) == (words,)


@pytest.mark.parametrize("text", ["", STATUS.replace("Seccomp:\t2\n", ""), STATUS.replace("CapBnd:\t0", "CapBnd:\tz")])
def test_a_status_that_does_not_tell_is_an_error(text: str) -> None:
    with pytest.raises(PlatformError):
        parse_status(text)


HEADER = "Inter-|   Receive  |  Transmit\n face |bytes    packets|bytes    packets\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HEADER, ()),
        (HEADER + "    lo:       0       0\n", ()),
        (HEADER + "    lo: 0 0\n  eth0:1234 0\nwg-1: 0 0\n", ("eth0", "wg-1")),
    ],
)
def test_interfaces_other_than_the_loopback_are_found(text: str, expected: tuple[str, ...]) -> None:
    assert foreign_interfaces(text) == expected
