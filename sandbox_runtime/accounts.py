"""The image's accounts: names to numbers, and the login shell of a uid."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from openshell.isolation.policy_grammar import is_numeric, numeric_id

FALLBACK_SHELL = "/bin/sh"
_LARGEST_FILE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One line of passwd(5)."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str
    """As the file says; empty means the system's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """The accounts and groups of an image. A malformed line belongs to nobody."""

    users: tuple[Account, ...] = ()
    groups: tuple[tuple[str, int], ...] = ()
    """Name and gid."""

    def user(self, uid: int) -> Account | None:
        """The first account with *uid*."""
        return next((account for account in self.users if account.uid == uid), None)

    def uid_of(self, selector: str) -> int | None:
        """The uid that a number or a name stands for; None for an unknown name or what can be no uid."""
        if is_numeric(selector):
            return numeric_id(selector)
        return next((account.uid for account in self.users if account.name == selector), None)

    def gid_of(self, selector: str) -> int | None:
        """The gid that a number or a name stands for; None for an unknown name or what can be no gid."""
        if is_numeric(selector):
            return numeric_id(selector)
        return next((gid for name, gid in self.groups if name == selector), None)

    def login_shell(self, uid: int) -> str:
        """The shell of *uid*, :data:`FALLBACK_SHELL` when the image names none."""
        account = self.user(uid)
        return account.shell if account is not None and account.shell.startswith("/") else FALLBACK_SHELL


def parse_accounts(passwd: str, group: str) -> Accounts:
    """Read the texts of passwd(5) and group(5)."""
    users = []
    for line in passwd.splitlines():
        fields = line.split(":")
        if len(fields) != 7:
            continue
        uid, gid = numeric_id(fields[2]), numeric_id(fields[3])
        if uid is not None and gid is not None:
            users.append(Account(name=fields[0], uid=uid, gid=gid, home=fields[5], shell=fields[6]))
    groups = []
    for line in group.splitlines():
        fields = line.split(":")
        gid = numeric_id(fields[2]) if len(fields) == 4 else None
        if gid is not None:
            groups.append((fields[0], gid))
    return Accounts(users=tuple(users), groups=tuple(groups))


def read_accounts(root: Path = Path("/")) -> Accounts:
    """The accounts of the image at *root*; none where it has no such files."""
    return parse_accounts(_text(root / "etc/passwd"), _text(root / "etc/group"))


def _text(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return stream.read(_LARGEST_FILE_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
