"""Descriptor sets of published OpenShell releases: data, read through :mod:`openshell.schema`."""
