"""What values of a policy look like, the same for whoever forwards or enforces one (isolation contract 3.4)."""

from __future__ import annotations

from typing import Final

POLICY_VERSION: Final = 1
"""The one version of the policy schema that is known."""

MAX_NUMERIC_ID: Final = 2**32 - 2
"""The largest uid or gid; the next number means none at all (chown(2))."""
_MOST_DIGITS: Final = len(str(MAX_NUMERIC_ID))


def is_normal_path(path: str) -> bool:
    """Whether a path is absolute and has no empty, ``.`` or ``..`` part and no NUL. A slash at the end is allowed."""
    if not path.startswith("/") or "\0" in path:
        return False
    return all(part not in ("", ".", "..") for part in path.removesuffix("/").split("/")[1:])


def is_numeric(selector: str) -> bool:
    """Whether a user or group is named by a number, not by its name. The number may be larger than any id."""
    return selector.isascii() and selector.isdigit()


def numeric_id(selector: str) -> int | None:
    """The uid or gid that a number stands for; None for a name and for what is larger than any id.

    Zeros in front mean nothing, however many there are. Python refuses to read very long numbers at all.
    """
    digits = selector.lstrip("0") or "0"
    if not is_numeric(selector) or len(digits) > _MOST_DIGITS or int(digits) > MAX_NUMERIC_ID:
        return None
    return int(digits)
