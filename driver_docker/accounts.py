"""The account files of an image, read once an image ID from a container that never starts."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from driver_docker.concurrency import together
from driver_docker.engine import ContainerSpec, EngineAbsentError, EngineError, EngineRefusedError
from driver_docker.identity import MAX_ACCOUNTS_BYTES, Accounts, IdentityError, parse_group, parse_passwd
from driver_docker.staging import read_single_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from driver_docker.engine import Engine


class AccountsReader:
    """Reads `/etc/passwd` and `/etc/group` of images and keeps what they said."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[str, Accounts] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def read(self, image_id: str, *, container_name: str, labels: Mapping[str, str]) -> Accounts:
        """The accounts of an image.

        Args:
            image_id: The pinned image.
            container_name: Name for the container that the files are read from.
            labels: Its labels, by which it is reclaimed after a crash.

        Raises:
            IdentityError: A file is malformed or too large.
            EngineError: The engine failed.
        """
        if (known := self._known.get(image_id)) is not None:
            return known
        async with self._locks.setdefault(image_id, asyncio.Lock()):
            if (known := self._known.get(image_id)) is not None:
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
            return accounts

    async def _file(self, container: str, path: str) -> bytes | None:
        try:
            tar = await self._engine.get_archive(container, path, max_bytes=MAX_ACCOUNTS_BYTES)
        except EngineAbsentError:
            return None
        except EngineRefusedError as error:
            raise IdentityError(f"{path} of the image cannot be read: {error.message}") from error
        return read_single_file(tar)
