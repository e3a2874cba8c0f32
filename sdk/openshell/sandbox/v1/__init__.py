"""Messages of ``openshell.sandbox.v1``: policies and the effective configuration of a sandbox."""

from openshell._messages.openshell.sandbox.v1 import *  # noqa: F403
from openshell._messages.openshell.sandbox.v1 import __all__ as __all__
