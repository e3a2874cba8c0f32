"""The account files of images, read from an engine that archives a link as a link."""

from __future__ import annotations

import asyncio
import gc
import io
import tarfile
from typing import TYPE_CHECKING, cast

import pytest

from driver_docker.accounts import MAX_KNOWN_IMAGES, AccountsReader
from driver_docker.engine import EngineAbsentError
from driver_docker.identity import Account, Group, IdentityError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from driver_docker.engine import Engine
    from driver_docker.engine_objects import ContainerSpec
    from driver_docker.identity import Accounts

PASSWD = b"agent:x:1200:1300::/:/bin/sh\n"
GROUP = b"agents:x:1300:\n"
USERS, GROUPS = (Account(name="agent", uid=1200, gid=1300),), (Group(name="agents", gid=1300),)


class ImageFiles:
    """An engine whose images hold these paths: a file's content, a link's target as text, `None` for a folder."""

    def __init__(self, paths: Mapping[str, bytes | str | None]) -> None:
        self.paths = paths
        self.created: list[str] = []
        self.removed: list[str] = []

    async def create_container(self, spec: ContainerSpec) -> str:
        self.created.append(spec.image)
        return "made"

    async def remove_container(self, container: str) -> None:
        self.removed.append(container)

    async def get_archive(self, _: str, path: str, *, max_bytes: int) -> bytes:
        if path not in self.paths:
            raise EngineAbsentError(path)
        found, buffer = self.paths[path], io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            header = tarfile.TarInfo(path.rpartition("/")[2])
            if isinstance(found, bytes):
                header.size = len(found)
                archive.addfile(header, io.BytesIO(found))
            else:
                header.type = tarfile.DIRTYPE if found is None else tarfile.SYMTYPE
                header.linkname = found or ""
                archive.addfile(header)
        assert len(buffer.getvalue()) <= max_bytes
        return buffer.getvalue()

    async def link_target(self, _: str, path: str) -> str | None:
        found = self.paths[path]
        return found if isinstance(found, str) else None


def reader(engine: ImageFiles) -> AccountsReader:
    return AccountsReader(cast("Engine", engine))


async def read(accounts: AccountsReader, image: str = "sha256:1") -> Accounts:
    return await accounts.read(image, container_name="asked-identity", labels={})


async def test_files_are_read_and_a_missing_one_is_none() -> None:
    engine = ImageFiles({"/etc/passwd": PASSWD})
    found = await read(reader(engine))
    assert (found.users, found.groups) == (USERS, None)
    assert engine.removed == ["asked-identity"]


async def test_a_file_that_is_a_link_is_read_where_it_leads() -> None:
    engine = ImageFiles(
        {
            "/etc/passwd": "/nix/store/x-etc/passwd",
            "/nix/store/x-etc/passwd": PASSWD,
            "/etc/group": "/nix/store/x-etc/group",
            "/nix/store/x-etc/group": GROUP,
        }
    )
    found = await read(reader(engine))
    assert (found.users, found.groups) == (USERS, GROUPS)


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ({"/etc/passwd": "/gone"}, "/etc/passwd of the image is a symbolic link to /gone, where no file is"),
        ({"/etc/passwd": "/d", "/d": None}, "/etc/passwd of the image is a symbolic link to /d, where no file is"),
        ({"/etc/group": None}, "/etc/group of the image is not a file"),
    ],
)
async def test_what_is_no_file_is_not_taken_for_an_absent_one(paths: dict[str, str | None], words: str) -> None:
    engine = ImageFiles(paths)
    with pytest.raises(IdentityError) as refused:
        await read(reader(engine))
    assert (refused.value.message, refused.value.reason) == (words, "IdentityResolutionFailed")
    assert engine.removed == ["asked-identity"]


async def test_an_image_is_read_once_by_all_who_ask() -> None:
    engine = ImageFiles({"/etc/passwd": PASSWD})
    accounts = reader(engine)
    await asyncio.gather(*(read(accounts) for _ in range(5)))
    await read(accounts)
    assert engine.created == ["sha256:1"]


async def test_only_the_images_that_were_asked_for_last_are_kept() -> None:
    engine = ImageFiles({"/etc/passwd": PASSWD})
    accounts = reader(engine)
    for number in range(MAX_KNOWN_IMAGES):
        await read(accounts, f"sha256:{number}")
    await read(accounts, "sha256:0")  # now the newest
    await read(accounts, "sha256:more")
    asked = len(engine.created)
    await read(accounts, "sha256:0")
    assert len(engine.created) == asked
    await read(accounts, "sha256:1")
    assert engine.created[asked:] == ["sha256:1"]
    gc.collect()
    assert len(accounts._known) == MAX_KNOWN_IMAGES
    assert not accounts._locks
