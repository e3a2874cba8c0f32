"""What each image holds."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from devtools.images.archive import Entry, ImageConfig, directory, symlink
from devtools.images.closure import Closure, ProjectTree
from devtools.images.compiled import Compilation, compile_all
from devtools.images.errors import BuildInputError
from devtools.images.interpreter import PYTHON_HOME, Interpreter, module_folder, relocate
from devtools.images.wheels import read_lock, shipped_requirements, wheel_files
from openshell.ready_line import READY_LABEL, READY_LABEL_VALUE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from devtools.images.progress import ImageProgress

ROOT = Path(__file__).resolve().parents[2]
"""The project's folder."""

RUNTIME_ENTRY = "/.openshell/runtime/openshell-sandbox"
"""The runtime's executable (compute-driver contract 5.5)."""

SUPERVISOR_ENTRY = "/openshell-supervisor"
"""The supervisor's executable (compute-driver contract 5.7)."""

SUPERVISOR_USER = "65534:65534"
"""Who the supervisor runs as, whatever the engine is told (compute-driver contract 5.7)."""

_SHIPPED_MODULES = frozenset({"cryptography", "google", "grpc", "jwt", "structlog", "typing_extensions"})
"""What the shipped distributions let one import."""

_PROJECT_PACKAGES = ("openshell", "sandbox_runtime", "supervisor_reference")


class Role(StrEnum):
    """What an image is for; the value is its label and the end of its repository's name."""

    WORKLOAD = "workload"
    RUNTIME = "runtime"
    SUPERVISOR = "supervisor"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecipe:
    """How a layer is made.

    Attributes:
        name: For people: in the cache's file names and in progress.
        key: A digest of everything that goes into it.
        entries: Makes its entries; is given an empty folder that lives until they were read.
    """

    name: str
    key: str
    entries: Callable[[Path, ImageProgress], list[Entry]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRecipe:
    """How an image is made.

    Attributes:
        name: The end of its repository's name, and of its archive's.
        layers: Lowest first.
        config: What it says of itself.
    """

    name: str
    layers: tuple[LayerRecipe, ...]
    config: ImageConfig


def digest_of(*parts: object) -> str:
    """Digest values that JSON can hold, in order."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def builder_digest() -> str:
    """Digest the sources of the builder itself: another builder may make another image of the same inputs."""
    folder = Path(__file__).resolve().parent
    return digest_of([(path.name, path.read_text("utf-8")) for path in sorted(folder.glob("*.py"))])


def python_layer(interpreter: Interpreter, site_packages: Path, root: Path = ROOT) -> LayerRecipe:
    """The relocated interpreter with the locked wheels, shared by runtime and supervisor.

    Raises:
        BuildInputError: when what is installed is not what the lock file says.
    """
    lock = read_lock((root / "requirements.lock").read_text("utf-8"))
    shipped = shipped_requirements(lock, site_packages)
    wheels = [(requirement.name, requirement.version, requirement.hashes) for requirement in shipped]

    def entries(work: Path, progress: ImageProgress) -> list[Entry]:
        return relocate(interpreter, wheel_files(site_packages), work, progress)

    key = digest_of("python", builder_digest(), interpreter.identity, PYTHON_HOME, wheels)
    return LayerRecipe(name="python", key=key, entries=entries)


def component_modules(package: str, root: Path = ROOT) -> Closure:
    """Find what a component of the project is made of.

    Raises:
        BuildInputError: when it imports something that no image holds.
    """
    tree = ProjectTree((root / "sdk", root), _PROJECT_PACKAGES)
    modules = tree.package(package)
    if not modules:
        raise BuildInputError(f"the project has no package {package} below {root}")
    closure = tree.closure(modules)
    if foreign := sorted(closure.foreign - _SHIPPED_MODULES - sys.stdlib_module_names):
        raise BuildInputError(
            f"{package} imports {', '.join(foreign)}, which its image does not hold; "
            "let it do without, or add the distribution to devtools/images/wheels.py"
        )
    return closure


def _application_layer(
    package: str, entry_source: Path, entry: str, interpreter: Interpreter, root: Path
) -> LayerRecipe:
    closure = component_modules(package, root)
    sources = [(module, module.path.read_bytes()) for module in closure.modules]
    script = entry_source.read_bytes()
    folder = module_folder(interpreter.version)
    key = digest_of(
        "application", builder_digest(), interpreter.build, entry, hashlib.sha256(script).hexdigest(),
        [(module.archive_path, hashlib.sha256(content).hexdigest()) for module, content in sources],
    )  # fmt: skip

    def entries(work: Path, progress: ImageProgress) -> list[Entry]:
        made = [Entry(path=entry.removeprefix("/"), mode=0o555, content=script)]
        jobs: list[Compilation] = []
        tag = f"cpython-{interpreter.version.replace('.', '')}"
        for module, content in sources:
            # The sources go in as well: a traceback in a log then shows its lines.
            source = work / module.archive_path
            source.parent.mkdir(parents=True, exist_ok=True)
            source.write_bytes(content)
            compiled = source.parent / "__pycache__" / f"{source.stem}.{tag}.pyc"
            compiled.parent.mkdir(exist_ok=True)
            jobs.append(Compilation(source=source, target=compiled, shown=f"{folder}/{module.archive_path}"))
            for path in (source, compiled):
                name = f"{folder}/{path.relative_to(work).as_posix()}".removeprefix("/")
                made.append(Entry(path=name, source=path))
        step = f"compile {package}"
        progress.started(step, len(jobs))
        compile_all(interpreter.executable, jobs, lambda amount: progress.advanced(step, amount))
        progress.finished(step)
        return made

    return LayerRecipe(name=package.replace("_", "-"), key=key, entries=entries)


def labels(role: Role, version: str, revision: str) -> dict[str, str]:
    """The labels of an image (design section 8)."""
    return {
        "openshell.ai/component": role.value,
        "openshell.ai/compute-protocol": "1.0",
        "openshell.ai/isolation-protocol": "1.0",
        "org.opencontainers.image.revision": revision,
        "org.opencontainers.image.version": version,
    }


def runtime_recipe(
    python: LayerRecipe, interpreter: Interpreter, image_labels: Mapping[str, str], root: Path = ROOT
) -> ImageRecipe:
    """The sandbox runtime: a tree below ``/.openshell/runtime`` that fills a volume and runs in any image."""
    application = _application_layer(
        "sandbox_runtime", root / "images" / "runtime" / "openshell-sandbox", RUNTIME_ENTRY, interpreter, root
    )
    config = ImageConfig(entrypoint=(RUNTIME_ENTRY,), user=SUPERVISOR_USER, labels=image_labels)
    return ImageRecipe(name=Role.RUNTIME.value, layers=(python, application), config=config)


def supervisor_recipe(
    python: LayerRecipe, interpreter: Interpreter, image_labels: Mapping[str, str], root: Path = ROOT
) -> ImageRecipe:
    """The reference supervisor: the same interpreter, an unprivileged user, and mount points for a read-only root.

    It bears one label more than the given ones: its supervisor tells by itself when it is ready.
    """
    source = root / "images" / "supervisor" / "openshell-supervisor"
    application = _application_layer("supervisor_reference", source, SUPERVISOR_ENTRY, interpreter, root)
    tells = {READY_LABEL: READY_LABEL_VALUE}
    config = ImageConfig(entrypoint=(SUPERVISOR_ENTRY,), user=SUPERVISOR_USER, labels={**image_labels, **tells})
    layers = (python, supervisor_root_layer(root), application)
    return ImageRecipe(name=Role.SUPERVISOR.value, layers=layers, config=config)


def supervisor_root_layer(root: Path = ROOT) -> LayerRecipe:
    """Accounts, names and mount points of the supervisor's read-only root."""
    seed = root / "images" / "supervisor"
    return files_layer(
        "supervisor-root",
        [
            *_seeded(seed, ("etc/passwd", "etc/group", "etc/hosts", "etc/nsswitch.conf")),
            directory(".openshell/channel"),
            directory(".openshell/supervisor"),
            directory("run", mode=0o700, uid=65534, gid=65534),
            directory("tmp", mode=0o1777),
            directory("var/log", mode=0o700, uid=65534, gid=65534),
        ],
    )


def workload_recipe(busybox: Path, image_labels: Mapping[str, str], root: Path = ROOT) -> ImageRecipe:
    """The demo workload: a static busybox, a non-root account, and little else."""
    return ImageRecipe(
        name=Role.WORKLOAD.value,
        layers=(workload_layer(busybox, root),),
        config=ImageConfig(
            user="sandbox",
            working_directory="/sandbox",
            command=("/bin/sh",),
            environment={"PATH": "/bin"},
            labels=image_labels,
        ),
    )


def workload_layer(busybox: Path, root: Path = ROOT, *, accounts: bool = True) -> LayerRecipe:
    """The root of the demo workload.

    Args:
        busybox: A static busybox.
        root: The project's folder.
        accounts: Whether it has ``/etc/passwd`` and ``/etc/group``.
    """
    seed = root / "images" / "workload"
    program = busybox.read_bytes()
    applets = (seed / "applets").read_text("utf-8").split()
    return files_layer(
        "workload",
        [
            Entry(path="bin/busybox", mode=0o755, content=program),
            *(symlink(f"bin/{applet}", "busybox") for applet in applets),
            *_seeded(seed, ("etc/passwd", "etc/group") if accounts else ()),
            directory("tmp", mode=0o1777),
            directory("sandbox", mode=0o755, uid=1000, gid=1000),
        ],
    )


def files_layer(name: str, entries: list[Entry]) -> LayerRecipe:
    """A layer of entries whose content is in memory."""
    described = [
        (entry.path, entry.kind.value, entry.mode, entry.uid, entry.gid, entry.target,
         hashlib.sha256(entry.content).hexdigest())
        for entry in entries
    ]  # fmt: skip
    key = digest_of(name, builder_digest(), described)
    return LayerRecipe(name=name, key=key, entries=lambda _work, _progress: entries)


def _seeded(seed: Path, names: tuple[str, ...]) -> list[Entry]:
    return [Entry(path=name, mode=0o444, content=(seed / name).read_bytes()) for name in names]
