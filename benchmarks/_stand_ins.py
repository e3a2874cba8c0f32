"""Images whose programs do nothing, for measuring what driver and engine do without what runs in the containers.

A supervisor or runtime that comes up takes more of the processor than its launch, and in a burst those that run already
slow down those that are still to come. The stand-ins are ready at once and sleep.
"""

from __future__ import annotations

import contextlib
import io
import json
import secrets
import shutil
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from openshell.ready_line import READY_LINE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import docker

_REPOSITORY: Final = "openshell-bench"
_ACCOUNTS: Final = {
    "etc/passwd": b"root:x:0:0::/:/bin/sh\nagent:x:1000:1000::/:/bin/sh\n",
    "etc/group": b"root:x:0:\nagent:x:1000:\n",
}
_SLEEPER: Final = b"""#!/bin/sh
[ "$1" = health ] && exit 0
echo '%s' >&2
trap 'exit 0' TERM
while :; do sleep 1000 & wait $!; done
""" % READY_LINE.encode()


@contextlib.contextmanager
def stand_ins(engine: docker.APIClient, images: tuple[str, str, str]) -> Iterator[tuple[str, str, str]]:
    """References of a workload, a runtime and a supervisor, untagged again afterwards.

    Args:
        engine: Where they are made.
        images: The real ones, whose revisions the stand-ins bear.

    Raises:
        RuntimeError: There is no static busybox on the path.
    """
    busybox = shutil.which("busybox")
    if busybox is None:
        raise RuntimeError("busybox is not on the path; run it as ./dev bench driver")
    tag = secrets.token_hex(4)
    wanted = {
        "workload": (_ACCOUNTS, "USER agent"),
        "runtime": ({".openshell/runtime/openshell-sandbox": _SLEEPER}, "USER 0:0"),
        "supervisor": ({"openshell-supervisor": _SLEEPER}, "USER 65534:65534"),
    }
    made: list[str] = []
    try:
        for (role, (files, user)), image in zip(wanted.items(), images, strict=True):
            labels = engine.inspect_image(image)["Config"]["Labels"] or {}  # type: ignore[no-untyped-call]
            engine.import_image_from_data(
                _root(Path(busybox).read_bytes(), files),
                repository=f"{_REPOSITORY}/{role}",
                tag=tag,
                changes=["ENV PATH=/bin", user, *(f"LABEL {key}={json.dumps(value)}" for key, value in labels.items())],
            )
            made.append(f"{_REPOSITORY}/{role}:{tag}")
        yield made[0], made[1], made[2]
    finally:
        for reference in made:
            engine.remove_image(reference, force=True)


def _root(busybox: bytes, files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for folder in ("bin", "etc", "run", "tmp", "var", "var/log"):
            header = tarfile.TarInfo(folder)
            header.type, header.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(header)
        for path, content in {"bin/busybox": busybox, **files}.items():
            header = tarfile.TarInfo(path)
            header.size, header.mode = len(content), 0o755
            archive.addfile(header, io.BytesIO(content))
        for applet in ("sh", "sleep"):
            header = tarfile.TarInfo(f"bin/{applet}")
            header.type, header.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(header)
    return buffer.getvalue()
