"""The label by which what one test makes on an engine is found again."""

from __future__ import annotations

from dataclasses import dataclass

from devtools.inventory import RUN_LABEL

OWNER_LABEL = "openshell-docker.test/owner"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerLabel:
    """A label that belongs to one test; put it on everything that the test makes on the engine."""

    value: str
    run: str

    @property
    def labels(self) -> dict[str, str]:
        """To be given at creation."""
        return {OWNER_LABEL: self.value, RUN_LABEL: self.run}

    @property
    def filter(self) -> str:
        """To be given to a list call as ``filters={"label": …}``."""
        return f"{OWNER_LABEL}={self.value}"

    def __str__(self) -> str:
        return self.filter
