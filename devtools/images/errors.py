"""What can go wrong while images are built or loaded."""

from __future__ import annotations


class ImageError(RuntimeError):
    """An image could not be built, loaded or unloaded. The text says which, why, and what to do."""


class BuildInputError(ImageError):
    """Something an image is made from is missing, or is not what the lock file says."""


class ElfError(ImageError):
    """A binary is not an ELF file of the kind expected, or a library it needs was not found."""


class LoadError(ImageError):
    """The engine did not take an image."""
