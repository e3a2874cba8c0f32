"""The secrets that a supervisor was given, in the forms that its log may show them in. Pure.

A log's end is quoted without them (see `tail.redact`), whatever a supervisor wrote of itself.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

if TYPE_CHECKING:
    from openshell.isolation.documents import AuthBundle

_MIN_KEY_LINE_CHARS: Final = 16


def of_bundle(bundle: AuthBundle) -> tuple[str, ...]:
    """The credentials of a launch: its tokens, and its SSH host key whole and in lines."""
    key = bundle.ssh_host_private_key
    if not key:
        return (bundle.gateway_token, bundle.sandbox_token)
    lines = (line.strip() for line in key.splitlines())
    body = (line for line in lines if len(line) >= _MIN_KEY_LINE_CHARS and not line.startswith("-----"))
    return (bundle.gateway_token, bundle.sandbox_token, key, json.dumps(key).strip('"'), *body)


def of_proxy_credentials(content: bytes | None) -> tuple[str, ...]:
    """The upstream proxy's credentials, as their file has them: the pair, and the password alone.

    Args:
        content: The content of `proxy_auth_file`, `user:password`; `None` where none is configured.
    """
    if content is None:
        return ()
    pair = content.strip()
    text = pair.decode("utf-8", "replace")
    password = text.partition(":")[2]
    forms = (text, base64.b64encode(pair).decode(), password, quote(password, safe=""))
    return tuple(dict.fromkeys(form for form in forms if form))
