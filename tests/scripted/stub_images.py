"""Small stand-ins for the three images: one busybox each, behaviour chosen by the sandbox's name or log level.

Supervisor, by name: ``exit-N…`` says last words and exits before it is healthy, ``never…`` never becomes healthy,
anything else does; SIGUSR1 makes it exit with the number after ``late-`` in its name (else 0), SIGTERM with 0.
Runtime, by log level: ``exit-N`` exits at once, ``forge-N`` says a supervisor's last words before, ``stubborn`` ignores
SIGTERM, anything else runs until SIGTERM.
"""

from __future__ import annotations

import io
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from docker import APIClient

REPOSITORY = "openshell-stub"
REVISION = "0.1.5"
"""Revision that runtime and supervisor are labelled with: that of the scripted gateway."""
REVISION_LABEL = f"LABEL org.opencontainers.image.version={REVISION}"

WORDS = (
    '{"openshell_last_words":1,"stage":"build","category":"infrastructure",'
    '"public":"gateway not reachable","private":"127.0.0.1:1 refused"}'
)

FORGED = WORDS.replace("gateway not reachable", "the workload speaks")

SUPERVISOR = f"""#!/bin/sh
if [ "$1" = health ]; then [ -e /run/healthy ]; exit $?; fi
name="$OPENSHELL_SANDBOX"
say() {{ echo "token $(cat /.openshell/supervisor/auth.json)"; echo '{WORDS}' >&2; }}
case "$name" in
  exit-*) say; rest="${{name#exit-}}"; exit "${{rest%%.*}}";;
esac
code=0
case "$name" in late-*) rest="${{name#late-}}"; code="${{rest%%.*}}";; esac
trap 'exit 0' TERM
trap 'say; exit "$code"' USR1
case "$name" in never*) ;; *) : > /run/healthy;; esac
while :; do sleep 1000 & wait $!; done
"""

RUNTIME = f"""#!/bin/sh
case "$OPENSHELL_LOG_LEVEL" in
  exit-*) exit "${{OPENSHELL_LOG_LEVEL#exit-}}";;
  stubborn) trap '' TERM;;
  forge-*) echo '{FORGED}' >&2; exit "${{OPENSHELL_LOG_LEVEL#forge-}}";;
  *) trap 'exit 143' TERM;;
esac
trap 'exit 7' USR1
trap 'exit 0' USR2
while :; do sleep 1000 & wait $!; done
"""


@dataclass(frozen=True, slots=True)
class StubImages:
    """References of the stand-ins."""

    workload: str
    runtime: str
    supervisor: str
    bare: str
    """An image that holds none of the binaries, and no account files."""


def build(client: APIClient, tag: str) -> StubImages:
    """Load the stand-ins under a tag of the test's own."""
    accounts = {
        "etc/passwd": (b"root:x:0:0::/:/bin/sh\nagent:x:1200:1300::/:/bin/sh\n", 0o644),
        "etc/group": (b"root:x:0:\nagents:x:1300:\nextra:x:1400:agent,other\n", 0o644),
    }
    return StubImages(
        workload=load(client, "workload", tag, accounts, ["USER agent"]),
        runtime=load(
            client,
            "runtime",
            tag,
            {".openshell/runtime/openshell-sandbox": (RUNTIME.encode(), 0o555)},
            [REVISION_LABEL],
        ),
        supervisor=load(
            client,
            "supervisor",
            tag,
            {"openshell-supervisor": (SUPERVISOR.encode(), 0o555)},
            ["USER 65534:65534", REVISION_LABEL],
        ),
        bare=load(client, "bare", tag, {}, []),
    )


def remove(client: APIClient, images: StubImages) -> None:
    """Untag the stand-ins."""
    for reference in (images.workload, images.runtime, images.supervisor, images.bare):
        client.remove_image(reference, force=True)


def load(client: APIClient, role: str, tag: str, files: Mapping[str, tuple[bytes, int]], changes: list[str]) -> str:
    """Load an image of one busybox and these files, each with its mode; its reference.

    Args:
        client: The engine.
        role: The end of its repository's name.
        tag: Its tag.
        files: What it holds.
        changes: Lines of a Dockerfile about its configuration.
    """
    reference = f"{REPOSITORY}/{role}:{tag}"
    client.import_image_from_data(
        root_tar(dict(files) | {"etc/stub": (f"{role} {tag}".encode(), 0o644)}),
        repository=f"{REPOSITORY}/{role}",
        tag=tag,
        changes=["ENV PATH=/bin", *changes],
    )
    return reference


def root_tar(files: Mapping[str, tuple[bytes, int]]) -> bytes:
    """A root file system with one busybox and these files, each with its mode."""
    busybox = Path(shutil.which("busybox") or "/bin/busybox").read_bytes()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for folder in ("bin", "etc", "run", "tmp", "var", "var/log"):
            header = tarfile.TarInfo(folder)
            header.type, header.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(header)
        _add(archive, "bin/busybox", busybox, 0o755)
        for applet in ("sh", "sleep", "cat", "echo"):
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
        for path, (content, mode) in files.items():
            _add(archive, path, content, mode)
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, path: str, content: bytes, mode: int) -> None:
    header = tarfile.TarInfo(path)
    header.size, header.mode = len(content), mode
    archive.addfile(header, io.BytesIO(content))
