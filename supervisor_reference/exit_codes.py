"""The exit codes of the control supervisor, all in one place.

Only 0 and 78 are named by the contract (compute-driver contract 5.7); the rest follow ``sysexits.h`` so that an
operator who sees a bare number can look it up. Whatever the code, the last line on standard error says why
(`openshell.verdicts.LastWords`) for every code but 0.

==== ===================== =============================================================================================
Code Name                  Meaning
==== ===================== =============================================================================================
0    ``ORDERLY``           the main process ended and was reported, or the gateway asked for the stop
64   ``USAGE``             the command line, a launch file or an environment variable cannot be used
65   ``CONFIGURATION``     the sandbox's configuration could not be activated
69   ``INFRASTRUCTURE``    the gateway or the boundary could not be reached, or was lost
70   ``INTERNAL``          a defect of the supervisor
71   ``ENTRYPOINT``        the agent's program could not be started
76   ``INCOMPATIBLE``      gateway, backend and supervisor do not speak a common version
77   ``POLICY_REFUSED``    the isolation backend refused the policy
78   ``WORKSPACE``         the workspace root is not usable (``WorkspaceValidationFailed``)
130  ``INTERRUPTED``       ended by SIGINT; the boundary is left to its driver
143  ``TERMINATED``        ended by SIGTERM; the boundary is left to its driver
==== ===================== =============================================================================================
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from openshell.verdicts import Category


class ExitCode(IntEnum):
    """What the process returns; the module's table says when."""

    ORDERLY = 0
    USAGE = 64
    CONFIGURATION = 65
    INFRASTRUCTURE = 69
    INTERNAL = 70
    ENTRYPOINT = 71
    INCOMPATIBLE = 76
    POLICY_REFUSED = 77
    WORKSPACE = 78
    INTERRUPTED = 130
    TERMINATED = 143


_BY_CATEGORY: Final[dict[Category, ExitCode]] = {
    Category.POLICY_REFUSED: ExitCode.POLICY_REFUSED,
    Category.CONFIGURATION: ExitCode.CONFIGURATION,
    Category.INFRASTRUCTURE: ExitCode.INFRASTRUCTURE,
    Category.INCOMPATIBLE: ExitCode.INCOMPATIBLE,
    Category.ENTRYPOINT: ExitCode.ENTRYPOINT,
    Category.UNKNOWN: ExitCode.INTERNAL,
}


def exit_code_of(category: Category) -> ExitCode:
    """Return the exit code of a failure of this category."""
    return _BY_CATEGORY[category]
