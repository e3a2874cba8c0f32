"""Who the workload runs as: from selectors, the image and its account files to numbers. Pure.

Rules of compute-driver contract 5.8. Nothing ever resolves to root.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from driver_docker.errors import ProvisioningError
from openshell.isolation.documents import DocumentError, IdentitySource, WorkloadIdentity
from openshell.status import StatusCode

DEFAULT_UID: Final = 1000
DEFAULT_GID: Final = 1000
MAX_ACCOUNTS_BYTES: Final = 4 * 1024 * 1024
"""Largest account file that is read."""
MAX_ID: Final = 2**32 - 2
"""Largest user or group that there is."""
MAX_RUN_ID: Final = 2**31 - 1
"""Largest user or group that an engine starts a process as; files may belong to others."""
_PASSWD_FIELDS: Final = 7
_GROUP_FIELDS: Final = 4


class IdentityError(ProvisioningError):
    """The workload's user or group cannot be resolved in its image."""

    default_reason = "IdentityResolutionFailed"
    default_status = StatusCode.FAILED_PRECONDITION


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One line of `/etc/passwd`."""

    name: str
    uid: int
    gid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One line of `/etc/group`."""

    name: str
    gid: int
    members: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """The accounts of an image; a file that the image does not have is `None`."""

    users: tuple[Account, ...] | None = None
    groups: tuple[Group, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Selectors:
    """Which user and group were asked for, and by whom."""

    user: str
    group: str
    source: IdentitySource

    @property
    def needs_accounts(self) -> bool:
        """Whether the image's files must be read at all."""
        return bool(self.user or self.group)


def select(*, user: str, group: str, image_user: str) -> Selectors:
    """Choose the selectors: what the gateway admitted, else what the image names (`user[:group]`), else none."""
    image_name, _, image_group = image_user.partition(":")
    source = IdentitySource.POLICY if user or group else IdentitySource.IMAGE if image_user else IdentitySource.DEFAULT
    return Selectors(user=user or image_name, group=group or image_group, source=source)


def parse_passwd(data: bytes) -> tuple[Account, ...]:
    """Parse `/etc/passwd`.

    Raises:
        IdentityError: A line that is neither empty nor well formed.
    """
    accounts = []
    for number, parts in _lines(data, "/etc/passwd", _PASSWD_FIELDS):
        accounts.append(
            Account(
                name=parts[0],
                uid=_identifier(parts[2], f"/etc/passwd line {number}"),
                gid=_identifier(parts[3], f"/etc/passwd line {number}"),
            )
        )
    return tuple(accounts)


def parse_group(data: bytes) -> tuple[Group, ...]:
    """Parse `/etc/group`.

    Raises:
        IdentityError: A line that is neither empty nor well formed.
    """
    groups = []
    for number, parts in _lines(data, "/etc/group", _GROUP_FIELDS):
        members = tuple(member for member in parts[3].split(",") if member)
        groups.append(Group(name=parts[0], gid=_identifier(parts[2], f"/etc/group line {number}"), members=members))
    return tuple(groups)


def resolve(selectors: Selectors, accounts: Accounts, *, resource_digest: str) -> WorkloadIdentity:
    """Resolve to numbers.

    Args:
        selectors: What was asked for.
        accounts: The image's accounts; unused when nothing was asked for.
        resource_digest: What the identity was resolved from; the image ID.

    Raises:
        IdentityError: An unknown name, a number without a group, or root.
    """
    if not selectors.needs_accounts:
        return _identity(DEFAULT_UID, DEFAULT_GID, (), selectors.source, resource_digest)
    if selectors.user:
        account, uid = _user(selectors.user, accounts)
    else:
        account, uid = None, DEFAULT_UID
    if selectors.group:
        gid = _group(selectors.group, accounts)
    elif account is not None:
        gid = account.gid
    else:
        raise IdentityError(f"user {selectors.user} has no entry in the image's /etc/passwd and no group was given")
    listed = accounts.groups or ()
    extra = {group.gid for group in listed if account is not None and account.name in group.members}
    return _identity(uid, gid, tuple(sorted(extra - {gid, 0})), selectors.source, resource_digest)


def _user(selector: str, accounts: Accounts) -> tuple[Account | None, int]:
    users = accounts.users
    if selector.isascii() and selector.isdecimal():
        uid = _identifier(selector, "user")
        return next((user for user in users or () if user.uid == uid), None), uid
    if users is None:
        raise IdentityError(f"user {selector} cannot be looked up: the image has no /etc/passwd; give numbers instead")
    for user in users:
        if user.name == selector:
            return user, user.uid
    raise IdentityError(f"user {selector} is not in the image's /etc/passwd")


def _group(selector: str, accounts: Accounts) -> int:
    if selector.isascii() and selector.isdecimal():
        return _identifier(selector, "group")
    if accounts.groups is None:
        raise IdentityError(f"group {selector} cannot be looked up: the image has no /etc/group; give a number instead")
    for group in accounts.groups:
        if group.name == selector:
            return group.gid
    raise IdentityError(f"group {selector} is not in the image's /etc/group")


def _identity(
    uid: int, gid: int, extra: tuple[int, ...], source: IdentitySource, resource_digest: str
) -> WorkloadIdentity:
    if max(uid, gid, *extra) > MAX_RUN_ID:
        raise IdentityError(f"the workload would run as {uid}:{gid}; the engine takes ids up to {MAX_RUN_ID}")
    if uid == 0 or gid == 0:
        raise IdentityError(f"the workload would run as root ({uid}:{gid}); name another user and group")
    try:
        return WorkloadIdentity(
            uid=uid, gid=gid, supplementary_gids=extra, source=source, resource_digest=resource_digest
        )
    except DocumentError as error:
        raise IdentityError(f"the workload's identity cannot be used: {error.message}") from None


def _lines(data: bytes, file: str, fields: int) -> list[tuple[int, list[str]]]:
    found = []
    # At newlines alone: an account's comment may hold whatever else Python takes for the end of a line.
    for number, line in enumerate(data.decode("utf-8", "surrogateescape").split("\n"), start=1):
        if not line.strip():
            continue
        parts = line.split(":")
        if len(parts) != fields or not parts[0]:
            raise IdentityError(f"{file} of the image is malformed at line {number}")
        found.append((number, parts))
    return found


def _identifier(text: str, where: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text[:11]) > MAX_ID or len(text) > len(str(MAX_ID)):
        raise IdentityError(f"{where} is malformed: an id must be a number of at most {MAX_ID}")
    return int(text)
