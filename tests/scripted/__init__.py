"""Peers that answer from a script, over real transports, for what the real ones cannot be made to show on demand."""

import pkgutil

import pytest

# A comparison that fails in here shows both sides too, as it does in a test.
pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)))
