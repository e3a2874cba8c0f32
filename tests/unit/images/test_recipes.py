"""What an image's name depends on, and what its layers hold."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from devtools.images import layout
from devtools.images.archive import Entry
from devtools.images.build import ImageBuilder, image_key
from devtools.images.busybox import find_busybox
from devtools.images.cache import ArtifactCache
from devtools.images.interpreter import inspect_interpreter
from devtools.images.layout import (
    ROOT,
    ImageRecipe,
    LayerRecipe,
    Role,
    labels,
    python_layer,
    runtime_recipe,
    supervisor_recipe,
    workload_recipe,
)
from devtools.images.progress import SilentProgress

if TYPE_CHECKING:
    from devtools.images.interpreter import Interpreter

PYTHON = LayerRecipe(name="python", key="0" * 64, entries=lambda _work, _progress: [Entry(path="python")])


@pytest.fixture(scope="module")
def interpreter() -> Interpreter:
    return inspect_interpreter(Path(sys.executable))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    shutil.copytree(ROOT / "images", root / "images")
    for name, text in {
        "sandbox_runtime/__init__.py": "",
        "sandbox_runtime/cli.py": "from openshell import status",
        "supervisor_reference/__init__.py": "from openshell import verdicts",
        "sdk/openshell/__init__.py": "",
        "sdk/openshell/status.py": "",
        "sdk/openshell/verdicts.py": "",
        "sdk/openshell/client.py": "",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def keys(project: Path, interpreter: Interpreter) -> tuple[str, str]:
    runtime = runtime_recipe(PYTHON, interpreter, labels(Role.RUNTIME, "1", "r"), project)
    supervisor = supervisor_recipe(PYTHON, interpreter, labels(Role.SUPERVISOR, "1", "r"), project)
    return image_key(runtime), image_key(supervisor)


@pytest.mark.parametrize(
    ("edited", "runtime_changes", "supervisor_changes"),
    [
        ("sandbox_runtime/cli.py", True, False),
        ("sdk/openshell/status.py", True, False),
        ("sdk/openshell/verdicts.py", False, True),
        ("sdk/openshell/__init__.py", True, True),
        ("sdk/openshell/client.py", False, False),
        ("images/runtime/openshell-sandbox", True, False),
        ("images/supervisor/openshell-supervisor", False, True),
        ("images/supervisor/etc/passwd", False, True),
        ("images/workload/applets", False, False),
    ],
)
def test_an_edit_renames_the_images_that_hold_the_file(
    project: Path, interpreter: Interpreter, edited: str, runtime_changes: bool, supervisor_changes: bool
) -> None:
    before = keys(project, interpreter)
    with (project / edited).open("a") as file:
        file.write("\n# edited\n")
    after = keys(project, interpreter)

    assert (before[0] != after[0], before[1] != after[1]) == (runtime_changes, supervisor_changes)


def test_an_edit_does_not_touch_the_layer_of_interpreter_and_wheels(
    project: Path, interpreter: Interpreter, tmp_path: Path
) -> None:
    builder = ImageBuilder(ArtifactCache(tmp_path / "cache"))
    made: list[int] = []

    def entries(_work: Path, _progress: object) -> list[Entry]:
        made.append(1)
        return [Entry(path="python")]

    base = dataclasses.replace(PYTHON, entries=entries)
    image_labels = labels(Role.RUNTIME, "1", "r")
    first = builder.image(runtime_recipe(base, interpreter, image_labels, project))
    (project / "sandbox_runtime" / "cli.py").write_text("x = 1\n")
    second = builder.image(runtime_recipe(base, interpreter, image_labels, project))

    assert first.reference != second.reference
    assert made == [1]


def test_the_revision_is_a_label_but_no_part_of_the_name() -> None:
    recipes = [workload_recipe(find_busybox(), labels(Role.WORKLOAD, "1", revision)) for revision in ("a", "b")]

    assert image_key(recipes[0]) == image_key(recipes[1])


@pytest.mark.parametrize(
    "change",
    [
        {"user": "0"},
        {"working_directory": "/x"},
        {"command": ("x",)},
        {"environment": {"A": "1"}},
        {"architecture": "riscv64"},
        {"labels": {"org.opencontainers.image.version": "2"}},
    ],
)
def test_what_an_image_says_of_itself_is_part_of_its_name(change: dict[str, object]) -> None:
    recipe = workload_recipe(find_busybox(), labels(Role.WORKLOAD, "1", "r"))
    config = dataclasses.replace(recipe.config, **change)  # type: ignore[arg-type]  # each value fits its name

    assert image_key(dataclasses.replace(recipe, config=config)) != image_key(recipe)


def test_another_lock_or_interpreter_is_another_python_layer(
    interpreter: Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site_packages = Path(json.__file__)
    monkeypatch.setattr(layout, "shipped_requirements", lambda lock, _site: list(lock.values()))
    lock = tmp_path / "requirements.lock"
    lock.write_text("grpcio==1 --hash=sha256:aa\n")
    before = python_layer(interpreter, site_packages, tmp_path).key
    lock.write_text("grpcio==1 --hash=sha256:bb\n")
    other_wheel = python_layer(interpreter, site_packages, tmp_path).key
    other_python = python_layer(dataclasses.replace(interpreter, build="other"), site_packages, tmp_path).key

    assert len({before, other_wheel, other_python}) == 3


def contents(recipe: ImageRecipe, tmp_path: Path) -> dict[str, tarfile.TarInfo]:
    image = ImageBuilder(ArtifactCache(tmp_path / "contents"), SilentProgress()).image(recipe)
    found: dict[str, tarfile.TarInfo] = {}
    with tarfile.open(image.archive_path) as archive:
        for name in archive.getnames():
            if name.endswith("/layer.tar"):
                with tarfile.open(fileobj=archive.extractfile(name)) as layer:
                    found.update({member.name: member for member in layer.getmembers()})
    return found


def test_the_supervisor_has_its_entry_and_its_mount_points(
    project: Path, interpreter: Interpreter, tmp_path: Path
) -> None:
    recipe = supervisor_recipe(PYTHON, interpreter, labels(Role.SUPERVISOR, "1", "r"), project)
    found = contents(recipe, tmp_path)

    assert (recipe.config.user, recipe.config.entrypoint) == ("65534:65534", ("/openshell-supervisor",))
    assert found["openshell-supervisor"].mode == 0o555
    assert all(found[name].isdir() for name in (".openshell/channel", ".openshell/supervisor", "run", "tmp", "var/log"))


def test_the_runtime_lies_below_its_folder_alone(project: Path, interpreter: Interpreter, tmp_path: Path) -> None:
    bare = dataclasses.replace(PYTHON, entries=lambda _work, _progress: [])
    found = contents(runtime_recipe(bare, interpreter, labels(Role.RUNTIME, "1", "r"), project), tmp_path)
    outside = {name for name in found if not name.startswith(".openshell/runtime/")}
    modules = f".openshell/runtime/python/lib/python{interpreter.version}"

    assert outside == {".openshell", ".openshell/runtime"}
    assert found[".openshell/runtime/openshell-sandbox"].mode == 0o555
    assert f"{modules}/sandbox_runtime/cli.py" in found
    assert f"{modules}/openshell/status.py" in found
    assert f"{modules}/openshell/client.py" not in found
    assert {member.mode for member in found.values() if member.isfile()} == {0o444, 0o555}


def test_the_workload_has_an_account_and_a_writable_folder(tmp_path: Path) -> None:
    recipe = workload_recipe(find_busybox(), labels(Role.WORKLOAD, "1", "r"))
    found = contents(recipe, tmp_path)

    assert (recipe.config.user, recipe.config.working_directory) == ("sandbox", "/sandbox")
    assert (found["sandbox"].uid, found["sandbox"].gid) == (1000, 1000)
    assert found["tmp"].mode == 0o1777
    assert found["bin/sh"].linkname == "busybox"
    assert {"etc/passwd", "etc/group"} <= set(found)


def test_every_image_carries_the_labels_of_the_contract() -> None:
    assert labels(Role.SUPERVISOR, "1.2", "abc") == {
        "org.opencontainers.image.version": "1.2",
        "org.opencontainers.image.revision": "abc",
        "openshell.ai/component": "supervisor",
        "openshell.ai/compute-protocol": "1.0",
        "openshell.ai/isolation-protocol": "1.0",
    }
