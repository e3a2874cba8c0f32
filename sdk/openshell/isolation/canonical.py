"""Canonical JSON and the payload digest of a control request (isolation contract 3.3)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from openshell.isolation.errors import DocumentError

EXEC_EXPIRY = "exec_expires_at_unix_ms"
"""Envelope member that an exec's digest covers too."""


def canonical_json(value: object) -> bytes:
    """Compact UTF-8 JSON with the keys of every object sorted by their UTF-8 bytes.

    Short escapes where JSON has them, other controls as lower-case ``u00xx``, nothing else escaped, integers only.

    Raises:
        DocumentError: the value holds a float, a lone surrogate, or nests too deep.
    """
    _refuse_floats(value)
    try:
        # Code point order, which Python sorts by, is the order of the UTF-8 bytes.
        text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise DocumentError("request", "holds a lone surrogate") from None
    except (RecursionError, ValueError):
        raise DocumentError("request", "cannot be written as canonical JSON") from None


def payload_digest(request: Mapping[str, object], *, exec_expires_at_unix_ms: int | None = None) -> str:
    """Lower-case hex SHA-256 of the request object as transmitted, for an exec with its expiry.

    Args:
        request: the request object, nulls and defaults present.
        exec_expires_at_unix_ms: absolute deadline of an exec, Unix milliseconds.

    Raises:
        DocumentError: the object has no canonical form.
    """
    covered = dict(request)
    if exec_expires_at_unix_ms is not None:
        covered[EXEC_EXPIRY] = exec_expires_at_unix_ms
    return hashlib.sha256(canonical_json(covered)).hexdigest()


def _refuse_floats(value: object) -> None:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, float):
            raise DocumentError("request", "holds a number that is not an integer")
        if isinstance(item, Mapping):
            pending.extend(item.values())
        elif isinstance(item, list | tuple):
            pending.extend(item)
