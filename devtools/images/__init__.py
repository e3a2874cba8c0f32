"""The reference images: built from the local Python and the locked wheels, loaded into an engine, unloaded again."""

from __future__ import annotations

from devtools.images.build import BuiltImage, ImageBuilder, ImageSet, build_images
from devtools.images.engine import LoadedImages, images_in_engine, keep_images, load_images, unload_images
from devtools.images.errors import BuildInputError, ElfError, ImageError, LoadError
from devtools.images.progress import ImageProgress, SilentProgress, TerminalProgress

__all__ = [
    "BuildInputError",
    "BuiltImage",
    "ElfError",
    "ImageBuilder",
    "ImageError",
    "ImageProgress",
    "ImageSet",
    "LoadError",
    "LoadedImages",
    "SilentProgress",
    "TerminalProgress",
    "build_images",
    "images_in_engine",
    "keep_images",
    "load_images",
    "unload_images",
]
