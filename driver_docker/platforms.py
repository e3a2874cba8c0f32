"""Platforms of images and engines, and which images an engine can run. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from driver_docker.errors import ProvisioningError
from openshell.status import StatusCode

if TYPE_CHECKING:
    from driver_docker.engine_objects import EngineInfo, ImageFacts

_SPELLINGS: Final = {
    "x86_64": "amd64",
    "x86-64": "amd64",
    "aarch64": "arm64",
    "i386": "386",
    "i686": "386",
    "armhf": "arm",
    "armv6l": "arm",
    "armv7l": "arm",
}
_ALSO_RUNS: Final = {"amd64": frozenset({"386"}), "arm64": frozenset({"arm"})}
"""32-bit programs that a 64-bit machine of the same family runs."""


class PlatformError(ProvisioningError):
    """An image is for another platform than the engine's: its programs would end with an exec format error."""

    default_reason = "ImagePlatformMismatch"
    default_status = StatusCode.FAILED_PRECONDITION


def check_platform(reference: str, image: ImageFacts, engine: EngineInfo) -> None:
    """Refuse an image that the engine cannot run. A platform that one side does not tell is not compared.

    Args:
        reference: How the image was named, for the text.
        image: The image.
        engine: The engine.

    Raises:
        PlatformError: It is for another operating system or processor.
    """
    image_system, engine_system = image.operating_system.lower(), engine.operating_system.lower()
    image_machine, engine_machine = _machine(image.architecture), _machine(engine.architecture)
    same_system = not image_system or not engine_system or image_system == engine_system
    same_machine = (
        not image_machine
        or not engine_machine
        or image_machine == engine_machine
        or image_machine in _ALSO_RUNS.get(engine_machine, frozenset())
    )
    if same_system and same_machine:
        return
    wanted = f"{engine_system or 'unknown'}/{engine_machine or 'unknown'}"
    actual = f"{image_system or 'unknown'}/{image_machine or 'unknown'}"
    raise PlatformError(
        f"image {reference} was found but does not match the specified platform: it is for {actual} and this engine "
        f"runs {wanted}; use an image that is built for {wanted}"
    )


def _machine(name: str) -> str:
    return _SPELLINGS.get(name.lower(), name.lower())
