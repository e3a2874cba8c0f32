"""Images of launches: found or pulled by policy, one search shared by all who ask for the same image meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from driver_docker.config import PullPolicy
from driver_docker.engine import EngineAbsentError
from driver_docker.errors import DriverError, PreconditionError
from driver_docker.image_reference import ImageReference, parse_reference
from driver_docker.platforms import check_platform
from driver_docker.pull import ImageError, ImagePuller
from driver_docker.pull_progress import ProgressPacer

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver_docker.engine import Engine
    from driver_docker.engine_objects import ImageFacts, PullProgress
    from driver_docker.registry_credentials import RegistryLogins


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundImage:
    """An image that can be used, pinned by its ID."""

    facts: ImageFacts
    pulled: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Listener:
    """Somebody who waits for an image."""

    on_pull: Callable[[], None] = lambda: None
    on_progress: Callable[[PullProgress], None] = lambda _: None


class _Search:
    """One search and those who wait for it. It ends when the last of them goes away."""

    def __init__(self) -> None:
        self.task: asyncio.Task[FoundImage]
        self._listeners: list[_Listener] = []
        self._pulling = False

    async def join(self, listener: _Listener) -> FoundImage:
        """Wait for the result; the pull that goes on is told to those who come late as well."""
        self._listeners.append(listener)
        if self._pulling:
            listener.on_pull()
        try:
            return await asyncio.shield(self.task)
        finally:
            self._listeners.remove(listener)
            if not self._listeners and not self.task.done():
                self.task.cancel()
                await asyncio.wait([self.task])

    @property
    def abandoned(self) -> bool:
        """Whether everybody has gone away."""
        return not self._listeners

    def audience(self) -> int:
        """How many wait."""
        return len(self._listeners)

    def begin_pull(self) -> None:
        """Tell everybody that a pull begins."""
        self._pulling = True
        for listener in tuple(self._listeners):
            listener.on_pull()

    def tell(self, progress: PullProgress) -> None:
        """Tell everybody how the pull goes."""
        for listener in tuple(self._listeners):
            listener.on_progress(progress)


class Images:
    """Looks images up and pulls them.

    Args:
        engine: The engine.
        policy: When images of sandboxes are pulled.
        logins: Where credentials for registries are found.
    """

    def __init__(self, engine: Engine, policy: PullPolicy, logins: RegistryLogins) -> None:
        self._engine = engine
        self._policy = policy
        self._puller = ImagePuller(engine, logins)
        self._searches: dict[tuple[str, PullPolicy], _Search] = {}
        self._refreshes: dict[str, asyncio.Event] = {}
        self._log = structlog.get_logger("images")

    async def find(
        self,
        reference: str,
        *,
        on_pull: Callable[[], None] = lambda: None,
        on_progress: Callable[[PullProgress], None] = lambda _: None,
    ) -> FoundImage:
        """Find the image of a sandbox, and pull it where the policy says so.

        Args:
            reference: Tag, digest or ID.
            on_pull: Called once before a pull.
            on_progress: Called with the states of layers, at a bounded rate; their last states always.

        Raises:
            ImageReferenceError: The reference is none.
            ImageError: It is absent and cannot or must not be pulled.
            PlatformError: It is for another platform.
            EngineUnreachableError: The engine cannot be asked.
        """
        return await self._share(
            parse_reference(reference), self._policy, _Listener(on_pull=on_pull, on_progress=on_progress)
        )

    async def find_component(self, reference: str) -> FoundImage:
        """Find an image that the driver itself needs, in its present state: the supervisor's, the runtime's.

        It is pulled where it is missing, unless nothing is to be pulled at all (compute-driver contract 5.4 item 4). A
        refresh that goes on is waited for, so that no launch uses what is about to be replaced.

        Raises:
            DriverError: As `find`.
        """
        parsed = parse_reference(reference)
        if (refreshed := self._refreshes.get(parsed.canonical)) is not None:
            await refreshed.wait()
        never = self._policy is PullPolicy.NEVER
        return await self._share(parsed, PullPolicy.NEVER if never else PullPolicy.IF_NOT_PRESENT, _Listener())

    async def refresh(self, reference: str) -> None:
        """Fetch the newest content of a tag that moves; of others, nothing.

        A copy that is here already is kept where that fails.

        Args:
            reference: An image that the driver itself needs.

        Raises:
            DriverError: It could not be fetched, and there is no copy.
        """
        parsed = parse_reference(reference)
        if self._policy is PullPolicy.NEVER or not parsed.is_mutable or parsed.canonical in self._refreshes:
            return
        done = self._refreshes[parsed.canonical] = asyncio.Event()
        try:
            await self._share(parsed, PullPolicy.ALWAYS, _Listener())
        except DriverError as error:
            if await self._present(parsed) is None:
                raise
            self._log.warning(
                "image not refreshed, the copy on this engine is used", image=reference, error=error.message
            )
        finally:
            del self._refreshes[parsed.canonical]
            done.set()

    async def check(self, reference: str) -> None:
        """Refuse early what a launch would refuse later, without pulling anything.

        Raises:
            ImageReferenceError: The reference is none.
            PreconditionError: It is absent, and the policy is `never` or it is named by an ID.
            PlatformError: The copy that is here is for another platform.
        """
        parsed = parse_reference(reference)
        if self._policy is PullPolicy.ALWAYS and not parsed.is_id:
            return
        facts = await self._present(parsed)
        if facts is not None:
            check_platform(reference, facts, self._engine.info)
        elif self._policy is PullPolicy.NEVER or parsed.is_id:
            absent = self._absent(parsed)
            raise PreconditionError(absent.message, reason=absent.reason)

    async def _share(self, reference: ImageReference, policy: PullPolicy, listener: _Listener) -> FoundImage:
        key = (reference.canonical, policy)
        search = self._searches.get(key)
        if search is None or search.abandoned:
            search = self._searches[key] = _Search()
            search.task = asyncio.create_task(
                self._search(search, reference, policy), name=f"image {reference.canonical}"
            )
            search.task.add_done_callback(lambda _: self._ended(key, search))
        return await search.join(listener)

    def _ended(self, key: tuple[str, PullPolicy], search: _Search) -> None:
        if self._searches.get(key) is search:
            del self._searches[key]
        if not search.task.cancelled():
            search.task.exception()  # retrieved: those who waited have it, or nobody does any more

    async def _search(self, search: _Search, reference: ImageReference, policy: PullPolicy) -> FoundImage:
        facts = None
        if policy is not PullPolicy.ALWAYS or reference.is_id:
            facts = await self._present(reference)
        pulled = facts is None
        if facts is None:
            if policy is PullPolicy.NEVER or reference.is_id:
                raise self._absent(reference)
            facts = await self._pull(search, reference)
        check_platform(str(reference), facts, self._engine.info)
        return FoundImage(facts=facts, pulled=pulled)

    async def _pull(self, search: _Search, reference: ImageReference) -> ImageFacts:
        search.begin_pull()
        pacer = ProgressPacer(search.tell, audience=search.audience)
        try:
            await self._puller.pull(reference, pacer.hear)
        finally:
            pacer.finish()
        try:
            return await self._engine.inspect_image(reference.local)
        except EngineAbsentError as error:
            raise ImageError(f"image {reference} was pulled but cannot be used: {error.message}") from error

    async def _present(self, reference: ImageReference) -> ImageFacts | None:
        try:
            return await self._engine.inspect_image(reference.local)
        except EngineAbsentError:
            return None

    @staticmethod
    def _absent(reference: ImageReference) -> ImageError:
        if reference.is_id:
            return ImageError(f"image {reference} is not on this engine, and an ID cannot be pulled; name it by a tag")
        return ImageError(f"image {reference} is not on this engine and image_pull_policy is 'never'")
