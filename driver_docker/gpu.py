"""Which of the engine's CDI devices a sandbox gets. Pure but for the cursor of `GpuSelector`.

Rules of compute-driver contract 5.2 and 5.12. An engine lists one card under several names (by number, by UUID, and all
of them as `all`); only one family of names is counted, so that no card is given out twice in one sandbox.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from driver_docker.errors import InvalidRequestError, PreconditionError

if TYPE_CHECKING:
    from driver_docker.engine_objects import EngineInfo

GPU_PREFIX: Final = "nvidia.com/gpu="
ALL_GPUS: Final = f"{GPU_PREFIX}all"
_NUMBERED: Final = re.compile(re.escape(GPU_PREFIX) + r"(\d+)(?::(\d+))?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRequest:
    """How many GPUs a sandbox wants, or which devices exactly."""

    count: int
    devices: tuple[str, ...] = ()
    """Named by the caller; empty for the driver's choice."""


def gpu_request(*, wanted: bool, count: int | None, devices: tuple[str, ...]) -> GpuRequest | None:
    """Combine the gateway's GPU requirement with the caller's `cdi_devices`.

    Args:
        wanted: Whether a GPU requirement is present.
        count: Its count; absent means one, which is not the same as zero.
        devices: The caller's explicit devices.

    Raises:
        InvalidRequestError: A count of zero, devices without a requirement, or another number of devices than wanted.
    """
    if not wanted:
        if devices:
            raise InvalidRequestError("driver_config.cdi_devices needs resource_requirements.gpu; ask for GPUs as well")
        return None
    number = 1 if count is None else count
    if number == 0:
        raise InvalidRequestError("resource_requirements.gpu.count must be at least 1; leave gpu out for none")
    if devices and len(devices) != number:
        raise InvalidRequestError(
            f"driver_config.cdi_devices names {len(devices)} devices, but resource_requirements.gpu.count is {number}"
        )
    return GpuRequest(count=number, devices=devices)


def inventory(info: EngineInfo) -> tuple[str, ...]:
    """The GPUs that may be given out by default, in a stable order.

    `nvidia.com/gpu=all` counts as one device, and only where nothing else is listed under WSL2.
    """
    listed = {device for device in info.cdi_devices if device.startswith(GPU_PREFIX)}
    single = listed - {ALL_GPUS}
    if not single:
        return (ALL_GPUS,) if info.wsl2 and ALL_GPUS in listed else ()
    numbered = [(_NUMBERED.fullmatch(device), device) for device in single]
    by_number = [(int(found[1]), int(found[2] or 0), device) for found, device in numbered if found]
    if by_number:
        return tuple(device for _, _, device in sorted(by_number))
    return tuple(sorted(single))


class GpuSelector:
    """Gives GPUs out in turn. Cards are shared, not reserved: a card may serve several sandboxes."""

    def __init__(self) -> None:
        self._cursor = 0

    def peek(self, request: GpuRequest, info: EngineInfo) -> tuple[str, ...]:
        """What `take` would give now.

        Raises:
            PreconditionError: The engine offers no CDI devices, too few of them, or not the named ones.
        """
        if not info.cdi_supported:
            raise PreconditionError(
                "resource_requirements.gpu cannot be met: the engine has no CDI support "
                "(it lists no CDI spec directories; enable CDI in its configuration)"
            )
        if request.devices:
            missing = [device for device in request.devices if info.cdi_devices and device not in info.cdi_devices]
            if missing:
                raise PreconditionError(f"the engine does not know CDI device {missing[0]}")
            return request.devices
        offered = inventory(info)
        if len(offered) < request.count:
            raise PreconditionError(
                f"resource_requirements.gpu.count is {request.count}, but the engine lists {len(offered)} GPUs "
                "as CDI devices"
            )
        start = self._cursor % len(offered)
        return tuple(offered[(start + step) % len(offered)] for step in range(request.count))

    def take(self, request: GpuRequest, info: EngineInfo) -> tuple[str, ...]:
        """Choose and move on.

        Raises:
            PreconditionError: As `peek`.
        """
        chosen = self.peek(request, info)
        if not request.devices:
            self._cursor = (self._cursor + request.count) % len(inventory(info))
        return chosen
