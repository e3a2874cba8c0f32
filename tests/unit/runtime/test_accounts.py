from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_runtime.accounts import FALLBACK_SHELL, parse_accounts, read_accounts

if TYPE_CHECKING:
    from pathlib import Path

PASSWD = """root:x:0:0:root:/root:/bin/bash
agent:x:1000:1001:,,,:/home/agent:/bin/zsh
service:x:1002:1002::/nonexistent:
broken:x:abc:1:::
short:x:5
"""
GROUP = "root:x:0:\nagents:x:1001:agent\nbroken:x:\n"


@pytest.mark.parametrize(
    ("selector", "uid"),
    [
        ("agent", 1000),
        ("1500", 1500),
        ("root", 0),
        ("nobody", None),
        ("-1", None),
        ("1 0", None),
        ("4294967294", 4294967294),
        ("4294967295", None),
        ("9" * 5000, None),
        ("0" * 5000 + "7", 7),
        ("0" * 20 + "1000", 1000),
    ],
)
def test_a_user_is_a_name_or_a_number(selector: str, uid: int | None) -> None:
    assert parse_accounts(PASSWD, GROUP).uid_of(selector) == uid


@pytest.mark.parametrize(
    ("selector", "gid"), [("agents", 1001), ("7", 7), ("agent", None), ("broken", None), ("9" * 5000, None)]
)
def test_a_group_is_a_name_or_a_number(selector: str, gid: int | None) -> None:
    assert parse_accounts(PASSWD, GROUP).gid_of(selector) == gid


@pytest.mark.parametrize(("uid", "shell"), [(1000, "/bin/zsh"), (1002, FALLBACK_SHELL), (4711, FALLBACK_SHELL)])
def test_the_login_shell_has_a_fallback(uid: int, shell: str) -> None:
    assert parse_accounts(PASSWD, GROUP).login_shell(uid) == shell


def test_an_image_without_accounts_has_none(tmp_path: Path) -> None:
    assert read_accounts(tmp_path).users == ()
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_bytes(b"a\xff:x:7:7::/:/bin/sh\n")
    assert read_accounts(tmp_path).login_shell(7) == "/bin/sh"


def test_a_line_with_a_number_that_can_be_no_id_belongs_to_nobody() -> None:
    huge = "9" * 5000
    accounts = parse_accounts(f"a:x:{huge}:1:::\nb:x:1:{huge}:::\nc:x:2:2::/:\n", f"g:x:{huge}:\nh:x:3:\n")
    assert [account.name for account in accounts.users] == ["c"]
    assert accounts.groups == (("h", 3),)


@given(st.text(), st.text())
def test_no_text_is_an_error(passwd: str, group: str) -> None:
    accounts = parse_accounts(passwd, group)
    assert all(account.uid >= 0 for account in accounts.users)
