"""Messages of ``openshell.datamodel.v1``: metadata of stored objects, workspaces and providers."""

from openshell._messages.openshell.datamodel.v1 import *  # noqa: F403
from openshell._messages.openshell.datamodel.v1 import __all__ as __all__
