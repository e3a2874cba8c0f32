"""What values of a policy look like, the same for whoever forwards or enforces one (isolation contract 3.4)."""

from __future__ import annotations

from typing import Final

POLICY_VERSION: Final = 1
"""The one version of the policy schema that is known."""


def is_normal_path(path: str) -> bool:
    """Whether a path is absolute and has no empty, ``.`` or ``..`` part and no NUL. A slash at the end is allowed."""
    if not path.startswith("/") or "\0" in path:
        return False
    return all(part not in ("", ".", "..") for part in path.removesuffix("/").split("/")[1:])
