"""Steps of a launch, and the reason that a failure of each gives the condition (compute-driver contract 4.4)."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from driver_docker.engine import EngineError, EngineUnreachableError
from driver_docker.errors import DriverError, ProvisioningError, RecordError
from driver_docker.verdict import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def during(reason: str, *, refused: str = "") -> Iterator[None]:
    """Note of an error which step it ended, and let it pass: what it means to the caller stays the same.

    Args:
        reason: The step's reason. The innermost step counts.
        refused: What is said of an engine that answers and does not do it, where that ends the launch.

    Raises:
        ProvisioningError: The engine refused, and `refused` says what that means.
    """
    try:
        yield
    except DriverError as error:
        if refused and isinstance(error, EngineError) and not isinstance(error, EngineUnreachableError):
            raise ProvisioningError(f"{refused}: {error.message}", reason=reason) from error
        if error.step_reason is None:
            error.step_reason = reason
        raise


def as_failure(error: BaseException) -> tuple[str, str]:
    """The condition's reason and message for whatever ended a launch."""
    if not isinstance(error, DriverError):
        return Reason.CONTAINER_CREATE_FAILED, f"internal error of the driver ({type(error).__name__}); see its log"
    if isinstance(error, ProvisioningError):
        return error.reason, error.public_message
    default = Reason.BOUNDARY_STATE_CREATE_FAILED if isinstance(error, RecordError) else Reason.CONTAINER_CREATE_FAILED
    return error.step_reason or default, error.public_message
