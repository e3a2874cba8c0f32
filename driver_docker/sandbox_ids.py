"""Which texts can be a sandbox id: a plain name of a folder, and a label value.

An id comes from a peer and becomes a folder's name. So whatever takes one asks here first, and the records have one way
from an id to a folder, which asks again.
"""

from __future__ import annotations

import re
from typing import Final

from driver_docker.exit_journal import JOURNAL_FILE

_PLAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_TAKEN: Final = frozenset({JOURNAL_FILE})
"""What a namespace's folder holds beside the folders of its sandboxes; names with a leading dot are no ids anyway."""


def is_sandbox_id(text: str) -> bool:
    """Whether a sandbox of this driver can have this id."""
    return _PLAIN.fullmatch(text) is not None and text not in _TAKEN
