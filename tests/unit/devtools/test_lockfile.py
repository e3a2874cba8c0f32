from __future__ import annotations

from pathlib import Path

from devtools import lockfile

ROOT = Path(__file__).parents[3]
HASH = f"    --hash=sha256:{'0' * 64}"
PYPROJECT = """
[build-system]
requires = ["hatchling"]
[project]
name = "it"
dependencies = ["grpcio>=1.85.1"]
[project.optional-dependencies]
dev = ["it[other]", "Types_Docker>=7.1"]
"""
LOCK = "".join(
    f"{entry} \\\n{HASH}\n"
    for entry in ("grpcio==1.86.0", "hatchling==1.27.0", "types-docker==7.1.0.20260101 ; os_name == 'posix'")
)


def test_the_repositorys_lock_file_is_current() -> None:
    assert lockfile.problems((ROOT / lockfile.LOCK_NAME).read_text(), (ROOT / "pyproject.toml").read_text()) == []


def test_a_lock_file_that_satisfies_every_requirement_is_current() -> None:
    assert lockfile.problems(LOCK, PYPROJECT) == []


def test_a_requirement_that_is_not_locked_is_named() -> None:
    (problem,) = lockfile.problems(LOCK, PYPROJECT.replace('"hatchling"', '"hatchling", "absent>=1"'))
    assert problem.startswith("absent>=1 is not locked")


def test_a_locked_version_below_the_floor_is_named() -> None:
    (problem,) = lockfile.problems(LOCK.replace("1.86.0", "1.85.0"), PYPROJECT)
    assert problem.startswith("grpcio>=1.85.1 is not satisfied by the locked 1.85.0")


def test_an_entry_without_hash_and_an_address_are_named() -> None:
    lock = LOCK.replace(f"1.86.0 \\\n{HASH}", "1.86.0") + "--index-url https://example.invalid/simple\n"
    problems = lockfile.problems(lock, PYPROJECT)
    assert "grpcio==1.86.0 has no hash" in problems
    assert any(problem.startswith("names an address") for problem in problems)
