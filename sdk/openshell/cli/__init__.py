"""The ``openshell`` command."""

from openshell.cli._main import main as main
