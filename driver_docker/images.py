"""Images of launches: found or pulled by policy, one pull shared by everybody who waits for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from driver_docker.config import PullPolicy
from driver_docker.engine import EngineAbsentError, EngineError, EngineUnreachableError
from driver_docker.errors import PreconditionError, ProvisioningError
from openshell.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver_docker.engine import Engine, ImageFacts, PullProgress


class ImageError(ProvisioningError):
    """An image is not here and could not be fetched."""

    default_reason = "ImagePullFailed"
    default_status = StatusCode.FAILED_PRECONDITION


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundImage:
    """An image that can be used, pinned by its ID."""

    facts: ImageFacts
    pulled: bool


class Images:
    """Looks images up and pulls them."""

    def __init__(self, engine: Engine, policy: PullPolicy) -> None:
        self._engine = engine
        self._policy = policy
        self._pulls: dict[str, asyncio.Lock] = {}

    async def find(
        self,
        reference: str,
        *,
        on_pull: Callable[[], None] = lambda: None,
        on_progress: Callable[[PullProgress], None] = lambda _: None,
    ) -> FoundImage:
        """Find an image, and pull it where the policy says so.

        Args:
            reference: Tag, digest or ID.
            on_pull: Called once before a pull.
            on_progress: Called for each line of a pull.

        Raises:
            ImageError: It is absent and cannot or must not be pulled.
            EngineUnreachableError: The engine cannot be asked.
        """
        if self._policy is not PullPolicy.ALWAYS and (facts := await self._present(reference)) is not None:
            return FoundImage(facts=facts, pulled=False)
        if self._policy is PullPolicy.NEVER:
            raise ImageError(f"image {reference} is not on this engine and image_pull_policy is 'never'")
        async with self._pulls.setdefault(reference, asyncio.Lock()):
            # Whoever waited for somebody else's pull finds the image here.
            if self._policy is not PullPolicy.ALWAYS and (facts := await self._present(reference)) is not None:
                return FoundImage(facts=facts, pulled=False)
            on_pull()
            try:
                await self._engine.pull_image(reference, on_progress)
            except EngineUnreachableError:
                raise
            except EngineError as error:
                raise ImageError(
                    f"image {reference} is not on this engine and could not be pulled: {error.message}"
                ) from error
            facts = await self._present(reference)
        if facts is None:
            raise ImageError(f"image {reference} was pulled but is not on this engine")
        return FoundImage(facts=facts, pulled=True)

    async def check(self, reference: str) -> None:
        """Refuse early what a launch would refuse later: an absent image that must not be pulled.

        Raises:
            PreconditionError: It is absent and the policy is `never`.
        """
        if self._policy is PullPolicy.NEVER and await self._present(reference) is None:
            raise PreconditionError(
                f"image {reference} is not on this engine and image_pull_policy is 'never'", reason="ImagePullFailed"
            )

    async def _present(self, reference: str) -> ImageFacts | None:
        try:
            return await self._engine.inspect_image(reference)
        except EngineAbsentError:
            return None
