"""Which modules of the project a component needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from devtools.images.closure import ProjectTree
from devtools.images.errors import BuildInputError
from devtools.images.layout import component_modules

if TYPE_CHECKING:
    from pathlib import Path


def tree(root: Path, files: dict[str, str]) -> ProjectTree:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return ProjectTree((root,), ("ours", "lib"))


def reached(root: Path, files: dict[str, str]) -> tuple[list[str], list[str]]:
    project = tree(root, files)
    closure = project.closure(project.package("ours"))
    return [module.name for module in closure.modules], sorted(closure.foreign)


@pytest.mark.parametrize(
    ("statement", "modules", "foreign"),
    [
        ("import lib.a", ["lib", "lib.a", "ours"], []),
        ("from lib import a", ["lib", "lib.a", "ours"], []),
        ("from lib.a import name", ["lib", "lib.a", "ours"], []),
        ("def f():\n    from lib import a", ["lib", "lib.a", "ours"], []),
        ("if True:\n    pass\nelse:\n    import lib.a", ["lib", "lib.a", "ours"], []),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import lib.a, other", ["ours"], ["typing"]),
        (
            "import typing\nif typing.TYPE_CHECKING:\n    import other\nelse:\n    import lib.a",
            ["lib", "lib.a", "ours"],
            ["typing"],
        ),
        ("import other.deep", ["ours"], ["other"]),
        ("try:\n    import other\nexcept ImportError:\n    other = None", ["ours"], []),
        ("try:\n    import lib.a\nexcept ImportError:\n    pass", ["lib", "lib.a", "ours"], []),
        ("try:\n    import other\nexcept ValueError:\n    pass", ["ours"], ["other"]),
        ("try:\n    pass\nexcept ImportError:\n    import other", ["ours"], ["other"]),
        ("from lib import Lazy", ["lib", "lib.b", "ours"], []),
        ("from lib import Unknown", ["lib", "ours"], []),
    ],
)
def test_imports_are_followed(tmp_path: Path, statement: str, modules: list[str], foreign: list[str]) -> None:
    files = {
        "ours/__init__.py": statement,
        "lib/__init__.py": '_HOMES = {"Lazy": "lib.b"}',
        "lib/a.py": "",
        "lib/b.py": "",
    }

    assert reached(tmp_path, files) == (modules, foreign)


def test_imports_of_imports_and_relative_ones_are_followed(tmp_path: Path) -> None:
    files = {
        "ours/__init__.py": "",
        "ours/sub/__init__.py": "from . import x",
        "ours/sub/x.py": "from .. import y\nfrom ..deep.z import name",
        "ours/y.py": "import lib.a",
        "ours/deep/__init__.py": "",
        "ours/deep/z.py": "",
        "lib/__init__.py": "",
        "lib/a.py": "from lib.b import c",
        "lib/b/__init__.py": "",
        "lib/b/c.py": "import json",
        "lib/unused.py": "import never",
    }

    assert reached(tmp_path, files) == (
        ["lib", "lib.a", "lib.b", "lib.b.c", "ours", "ours.deep", "ours.deep.z", "ours.sub", "ours.sub.x", "ours.y"],
        ["json"],
    )


def test_a_circle_ends(tmp_path: Path) -> None:
    files = {"ours/__init__.py": "import lib.a", "lib/__init__.py": "", "lib/a.py": "import ours"}

    assert reached(tmp_path, files)[0] == ["lib", "lib.a", "ours"]


def test_a_component_that_imports_what_no_image_holds_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "sandbox_runtime").mkdir()
    (tmp_path / "sandbox_runtime" / "__init__.py").write_text("import json, sqlalchemy\n")

    with pytest.raises(BuildInputError, match="sandbox_runtime imports sqlalchemy, which its image does not hold"):
        component_modules("sandbox_runtime", tmp_path)


@pytest.mark.parametrize("package", ["sandbox_runtime", "supervisor_reference"])
def test_the_components_import_only_what_their_images_hold(package: str) -> None:
    names = {module.name for module in component_modules(package).modules}

    assert package in names
    assert "openshell" in names
    assert not {name for name in names if name.startswith(("openshell.cli", "openshell._messages"))}
