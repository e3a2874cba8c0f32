"""Where the image registry of the pull tests comes from."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from devtools import debian
from devtools.console import say
from devtools.errors import StepFailedError
from devtools.images.cache import cache_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

PACKAGE = "docker-registry"
VARIABLE = "OPENSHELL_TEST_DOCKER_REGISTRY"
"""Environment variable that names the program."""

_PLACE = "usr/bin/docker-registry"


def find_registry(environment: Mapping[str, str] | None = None) -> Path | None:
    """Find a registry's program: named by the environment, on the machine, or kept from before."""
    variables = os.environ if environment is None else environment
    if named := variables.get(VARIABLE):
        return Path(named)
    if found := shutil.which(PACKAGE, path=variables.get("PATH")):
        return Path(found)
    kept = _kept(variables)
    return kept if os.access(kept, os.X_OK) else None


def have_registry() -> dict[str, str]:
    """Find a registry's program, or take it out of the distribution's package, which is not installed.

    Returns:
        The environment that tells tests where it is. Empty where there is none, which is said: those tests skip.
    """
    found = find_registry()
    if found is None:
        say(f"fetching {PACKAGE} for the tests of image pulls (unpacked, not installed)")
        debian.read_lists_for(PACKAGE, log=cache_folder() / "apt.log")
        try:
            found = debian.unpack_program(PACKAGE, _PLACE, _kept(os.environ))
        except StepFailedError as error:
            say(f"tests of image pulls are skipped: {error}")
            return {}
    return {VARIABLE: str(found)}


def _kept(environment: Mapping[str, str]) -> Path:
    return cache_folder(environment) / "programs" / PACKAGE
