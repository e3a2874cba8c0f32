"""Versions that this gateway names: its own, and that of the public contract it speaks."""

from __future__ import annotations

import functools
from importlib import metadata

from openshell.schema import CONTRACT_VERSION

_DISTRIBUTION = "openshell-docker"


@functools.cache
def own_version() -> str:
    """Version of the installed distribution."""
    try:
        return metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0.0.0"


def gateway_version() -> str:
    """The contract's version with ours as build metadata, for example ``0.1.5+openshell-docker.0.1.0``."""
    return f"{CONTRACT_VERSION}+{_DISTRIBUTION}.{own_version()}"
