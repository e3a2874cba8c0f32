"""OpenShell SDK: typed clients for a gateway that runs agents in policed sandboxes.

Importing this package is light: a name is loaded when it is first used, and grpc only with a client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openshell._client import OpenShell as OpenShell
    from openshell._endpoint import ChannelOptions as ChannelOptions
    from openshell._endpoint import TlsConfig as TlsConfig
    from openshell._progress import Goal as Goal
    from openshell._sandboxes import Sandboxes as Sandboxes
    from openshell._watch import SandboxWatch as SandboxWatch
    from openshell._watch import WatchEvent as WatchEvent
    from openshell.errors import OpenShellError as OpenShellError
    from openshell.status import StatusCode as StatusCode
    from openshell.verdicts import Verdict as Verdict

_HOMES = {
    "ChannelOptions": "openshell._endpoint",
    "Goal": "openshell._progress",
    "OpenShell": "openshell._client",
    "OpenShellError": "openshell.errors",
    "SandboxWatch": "openshell._watch",
    "Sandboxes": "openshell._sandboxes",
    "StatusCode": "openshell.status",
    "TlsConfig": "openshell._endpoint",
    "Verdict": "openshell.verdicts",
    "WatchEvent": "openshell._watch",
}

__all__ = [
    "ChannelOptions",
    "Goal",
    "OpenShell",
    "OpenShellError",
    "SandboxWatch",
    "Sandboxes",
    "StatusCode",
    "TlsConfig",
    "Verdict",
    "WatchEvent",
]


def __getattr__(name: str) -> object:
    """Load a public name on first use."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted({*globals(), *_HOMES})
