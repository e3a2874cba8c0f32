"""Workload identities: selectors, account files, and never root (compute-driver contract 5.8)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver_docker.identity import Accounts, IdentityError, parse_group, parse_passwd, resolve, select
from openshell.isolation.documents import IdentitySource

PASSWD = b"root:x:0:0::/:/bin/sh\n\nagent:x:1200:1300::/:/bin/sh\nzero:x:5:0::/:/bin/sh\n"
GROUP = b"root:x:0:agent\nagents:x:1300:agent\nextra:x:1400:other,agent\nmore:x:1350:agent\n"
ACCOUNTS = Accounts(users=parse_passwd(PASSWD), groups=parse_group(GROUP))
NONE = Accounts()


@pytest.mark.parametrize(
    ("user", "group", "image_user", "accounts", "expected"),
    [
        ("", "", "", NONE, (1000, 1000, (), IdentitySource.DEFAULT)),
        ("", "", "agent", ACCOUNTS, (1200, 1300, (1350, 1400), IdentitySource.IMAGE)),
        ("", "", "1200", ACCOUNTS, (1200, 1300, (1350, 1400), IdentitySource.IMAGE)),
        ("", "", "agent:extra", ACCOUNTS, (1200, 1400, (1300, 1350), IdentitySource.IMAGE)),
        ("", "", "7:8", NONE, (7, 8, (), IdentitySource.IMAGE)),
        ("agent", "", "root", ACCOUNTS, (1200, 1300, (1350, 1400), IdentitySource.POLICY)),
        ("9", "extra", "", ACCOUNTS, (9, 1400, (), IdentitySource.POLICY)),
        ("agent", "77", "", ACCOUNTS, (1200, 77, (1300, 1350, 1400), IdentitySource.POLICY)),
    ],
)
def test_selectors_resolve_to_numbers(
    user: str, group: str, image_user: str, accounts: Accounts, expected: tuple[int, int, tuple[int, ...], str]
) -> None:
    identity = resolve(select(user=user, group=group, image_user=image_user), accounts, resource_digest="sha256:1")
    assert (identity.uid, identity.gid, identity.supplementary_gids, identity.source) == expected
    assert identity.resource_digest == "sha256:1"


@pytest.mark.parametrize(
    ("image_user", "accounts", "word"),
    [
        ("root", ACCOUNTS, "root"),
        ("0:5", ACCOUNTS, "root"),
        ("agent:0", ACCOUNTS, "root"),
        ("zero", ACCOUNTS, "root"),
        ("nobody", ACCOUNTS, "not in the image's /etc/passwd"),
        ("agent:nogroup", ACCOUNTS, "not in the image's /etc/group"),
        ("4711", ACCOUNTS, "no group was given"),
        ("agent", NONE, "no /etc/passwd"),
        ("7:agents", NONE, "no /etc/group"),
        ("4294967295:1", NONE, "at most"),
        ("2147483648:1", NONE, "takes ids up to 2147483647"),
        ("1:2147483648", NONE, "takes ids up to 2147483647"),
        ("99999999999999999999:1", NONE, "at most"),
        ("\u0661:1", ACCOUNTS, "not in the image's /etc/passwd"),
    ],
)
def test_what_does_not_resolve_is_an_error(image_user: str, accounts: Accounts, word: str) -> None:
    with pytest.raises(IdentityError) as refused:
        resolve(select(user="", group="", image_user=image_user), accounts, resource_digest="sha256:1")
    assert word in refused.value.message
    assert refused.value.reason == "IdentityResolutionFailed"


@pytest.mark.parametrize(
    "line", [b"a:b:c", b":x:1:1:::", b"a:x:one:1:::", b"a:x:-1:1:::", b"a:x:1:1::::", b"a:x: 1:1:::"]
)
def test_malformed_accounts_are_errors(line: bytes) -> None:
    with pytest.raises(IdentityError, match="malformed"):
        parse_passwd(b"root:x:0:0::/:/bin/sh\n" + line)


def test_malformed_groups_are_errors() -> None:
    with pytest.raises(IdentityError, match="line 2"):
        parse_group(b"a:x:1:\nb:x:1\n")


@given(st.binary(max_size=400))
def test_any_bytes_are_accounts_or_an_error(data: bytes) -> None:
    for parse in (parse_passwd, parse_group):
        try:
            parse(data)
        except IdentityError as error:
            assert error.public_message


@pytest.mark.parametrize("char", ["\u0085", "\u2028", "\u2029", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r"])
def test_only_a_newline_ends_a_line_of_an_account_file(char: str) -> None:
    users = parse_passwd(f"agent:x:1200:1300:A{char}B:/:/bin/sh\nnext:x:7:8::/:/bin/sh\n".encode())
    assert [(user.name, user.uid) for user in users] == [("agent", 1200), ("next", 7)]
