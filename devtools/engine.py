"""An engine for ``./dev``: the one that answers, else a private one."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from devtools.console import say
from devtools.engine_discovery import NO_SOCKET, FoundEngine, find_engine
from devtools.errors import PreconditionError
from devtools.private_engine import private_engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine that answers.

    Attributes:
        address: For ``DOCKER_HOST``.
        is_private: Whether it is ours alone, and ends with us.
    """

    address: str
    is_private: bool


@contextmanager
def an_engine(cache: Path) -> Iterator[Engine]:
    """Have an engine for the block.

    Args:
        cache: The cache folder, for the data of a private engine.

    Raises:
        PreconditionError: None answers and a private one is not possible, or ``DOCKER_HOST`` names one that does not
            answer: nothing is put in the place of what the user named.
        EngineFailedError: The private one did not start.
    """
    found = find_engine(os.environ)
    for skipped in found.skipped:
        if not found.exclusive and (skipped.reason != NO_SOCKET or found.address is None):
            say(f"no Docker Engine at {skipped}")
    if found.address is not None:
        say(f"using the Docker Engine at {found.address} ({found.origin})")
        yield Engine(address=found.address, is_private=False)
        return
    if found.exclusive:
        raise PreconditionError(_named_but_unusable(found))
    with private_engine(cache) as address:
        yield Engine(address=address, is_private=True)


def _named_but_unusable(found: FoundEngine) -> str:
    return (
        f"DOCKER_HOST names an engine that cannot be used: {found.explanation}.\n"
        "What to do: start that engine, or correct DOCKER_HOST, or unset it so that another is looked for."
    )
