"""One image pull carried out: the right login, progress passed on, and words for whatever goes wrong."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import structlog

from driver_docker.engine import EngineError
from driver_docker.errors import ProvisioningError, public_text
from driver_docker.registry_credentials import CredentialsError
from driver_docker.tail import redact
from openshell.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver_docker.engine import Engine
    from driver_docker.engine_objects import PullProgress
    from driver_docker.image_reference import ImageReference
    from driver_docker.registry_credentials import RegistryCredentials, RegistryLogins

_MAX_CAUSE_BYTES: Final = 600
"""Of a status text of 1 KiB, what the registry's words may take; the rest is for the image and the advice."""
_ABOUT_ACCESS: Final = re.compile(
    r"unauthori[sz]ed|authenticat|authoriz|no basic auth|denied|forbidden|\b40[13]\b", re.IGNORECASE
)
_ADDRESS: Final = re.compile(r"(https?://)(?:[^\s/@\"']+@)?([^\s?#\"']+)(?:[?#][^\s\"']*)?", re.IGNORECASE)


class ImageError(ProvisioningError):
    """An image is not here and could not be fetched."""

    default_reason = "ImagePullFailed"
    default_status = StatusCode.FAILED_PRECONDITION


class ImagePuller:
    """Pulls images with the logins of the driver's account."""

    def __init__(self, engine: Engine, logins: RegistryLogins) -> None:
        self._engine = engine
        self._logins = logins
        self._log = structlog.get_logger("images")

    async def pull(self, reference: ImageReference, on_progress: Callable[[PullProgress], None]) -> None:
        """Pull one image.

        A login that cannot be had is no failure by itself, since the image may be public; a failure names it.

        Args:
            reference: A name, never an ID.
            on_progress: Called on the event loop for each line of the engine.

        Raises:
            ImageError: It could not be pulled; the text holds the registry's cause.
        """
        credentials: RegistryCredentials | None = None
        trouble = ""
        try:
            credentials = await self._logins.find(reference.registry)
        except CredentialsError as error:
            trouble = error.message
            self._log.warning("pulling without a login", image=str(reference), error=trouble)
        try:
            await self._engine.pull_image(reference, on_progress, credentials=credentials)
        except EngineError as error:
            cause = pull_cause(error.message, credentials)
            advice = trouble or self._advice(reference, cause, credentials)
            status = StatusCode.UNAVAILABLE if error.status is StatusCode.UNAVAILABLE else None
            raise ImageError(
                f"image {reference} could not be pulled: {cause}" + (f" ({advice})" if advice else ""),
                status=status,
                retryable=error.retryable,
            ) from None

    def _advice(self, reference: ImageReference, cause: str, credentials: RegistryCredentials | None) -> str:
        """What an operator can do where the cause speaks of access. Only the advice rests on the registry's words."""
        if not _ABOUT_ACCESS.search(cause):
            return ""
        registry = reference.registry
        if credentials is not None:
            return f"sent with the login for {registry} from {self._logins.place}"
        return (
            f"sent without a login: {self._logins.place} has none for {registry}; "
            f"run `docker login {registry}` as the account of this driver"
        )


def pull_cause(words: str, credentials: RegistryCredentials | None = None) -> str:
    """The engine's words about a failed pull, fit to be told: one bounded line, never empty, without secrets.

    Addresses lose user names and queries, where registries put tokens and signatures.

    Args:
        words: The engine's words, which quote the registry's.
        credentials: What the registry was sent.
    """
    told = redact(words, credentials.secrets if credentials is not None else ())
    return public_text(_ADDRESS.sub(r"\1\2", told), limit_bytes=_MAX_CAUSE_BYTES)
