"""What the commands exit with."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """An exit code of `openshell-driver-docker`."""

    FINE = 0
    """Nothing is wrong."""
    FAULT = 1
    """A fault was found, or the driver failed."""
    CONFIGURATION = 2
    """The configuration cannot be used."""
