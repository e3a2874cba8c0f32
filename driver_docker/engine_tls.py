"""TLS files of a connection to an engine. Verification is never off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTls:
    """Which CA the engine's certificate must come from, and who this driver is to it."""

    ca: Path
    certificate: Path | None = None
    key: Path | None = None
