"""The account files of an image, read once an image ID from a container that never starts."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from driver_docker.concurrency import KeyedLocks, together
from driver_docker.engine import EngineAbsentError, EngineError, EngineRefusedError
from driver_docker.engine_objects import ContainerSpec
from driver_docker.identity import MAX_ACCOUNTS_BYTES, Accounts, IdentityError, parse_group, parse_passwd
from driver_docker.staging import read_single_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from driver_docker.engine import Engine


MAX_KNOWN_IMAGES: Final = 32
"""Of how many images the accounts are kept; those that were asked for last."""


class AccountsReader:
    """Reads `/etc/passwd` and `/etc/group` of images and keeps what they said."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: OrderedDict[str, Accounts] = OrderedDict()
        self._locks = KeyedLocks()

    async def read(self, image_id: str, *, container_name: str, labels: Mapping[str, str]) -> Accounts:
        """The accounts of an image.

        Args:
            image_id: The pinned image.
            container_name: Name for the container that the files are read from.
            labels: Its labels, by which it is reclaimed after a crash.

        Raises:
            IdentityError: A file is malformed, too large, or no file.
            EngineError: The engine failed.
        """
        async with self._locks.of(image_id):
            if (known := self._known.get(image_id)) is not None:
                self._known.move_to_end(image_id)
                return known
            spec = ContainerSpec(name=container_name, image=image_id, entrypoint=("/identity",), labels=labels)
            try:
                container = await self._engine.create_container(spec)
                passwd, group = await together(
                    self._file(container, "/etc/passwd"), self._file(container, "/etc/group")
                )
            finally:
                # By name: a cancelled create has been carried out, but its answer is lost.
                with contextlib.suppress(EngineError):
                    await self._engine.remove_container(container_name)
            accounts = Accounts(
                users=parse_passwd(passwd) if passwd is not None else None,
                groups=parse_group(group) if group is not None else None,
            )
            self._known[image_id] = accounts
            if len(self._known) > MAX_KNOWN_IMAGES:
                self._known.popitem(last=False)
            return accounts

    async def _file(self, container: str, path: str) -> bytes | None:
        tar = await self._archive(container, path)
        if tar is None:
            return None
        content = read_single_file(tar)
        if content is not None:
            return content
        # The engine archives a link as a link. Images that are put together from a store have their files so.
        target = await self._engine.link_target(container, path)
        tar = await self._archive(container, target) if target is not None else None
        content = read_single_file(tar) if tar is not None else None
        if content is None:
            leads = f"a symbolic link to {target}, where no file is" if target is not None else "not a file"
            raise IdentityError(f"{path} of the image is {leads}")
        return content

    async def _archive(self, container: str, path: str) -> bytes | None:
        try:
            return await self._engine.get_archive(container, path, max_bytes=MAX_ACCOUNTS_BYTES)
        except EngineAbsentError:
            return None
        except EngineRefusedError as error:
            raise IdentityError(f"{path} of the image cannot be read: {error.message}") from error
