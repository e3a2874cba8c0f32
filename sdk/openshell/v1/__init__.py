"""Messages of ``openshell.v1``, the public API: betterproto2 dataclasses, one for each protobuf message."""

from openshell._messages.openshell.v1 import *  # noqa: F403
from openshell._messages.openshell.v1 import __all__ as __all__
