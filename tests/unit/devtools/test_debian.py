from __future__ import annotations

import shutil
import stat
import subprocess
from typing import TYPE_CHECKING

import pytest

from devtools.debian import services_forbidden, unpack_program
from devtools.errors import StepFailedError

if TYPE_CHECKING:
    from pathlib import Path

FORBIDDING = "#!/bin/sh\nexit 101\n"
ALLOWING = "#!/bin/sh\nexit 0\n"


def write(policy: Path, text: str, mode: int = 0o755) -> None:
    policy.write_text(text)
    policy.chmod(mode)


def test_without_a_policy_one_is_there_for_the_block_only(tmp_path: Path) -> None:
    policy = tmp_path / "policy-rc.d"
    with services_forbidden(policy):
        assert "exit 101" in policy.read_text()
        assert stat.S_IMODE(policy.stat().st_mode) == 0o755
    assert list(tmp_path.iterdir()) == []


def test_a_policy_that_forbids_already_is_not_touched(tmp_path: Path) -> None:
    policy = tmp_path / "policy-rc.d"
    write(policy, FORBIDDING)
    before = policy.stat()
    with services_forbidden(policy):
        assert policy.stat().st_ino == before.st_ino
    assert policy.read_text() == FORBIDDING
    assert policy.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize(("text", "mode"), [(ALLOWING, 0o750), ("not a program", 0o644)])
def test_a_policy_that_does_not_forbid_comes_back_as_it_was(tmp_path: Path, text: str, mode: int) -> None:
    policy = tmp_path / "policy-rc.d"
    write(policy, text, mode)
    before = policy.stat()
    with pytest.raises(KeyError), services_forbidden(policy):
        assert "exit 101" in policy.read_text()
        raise KeyError
    assert policy.read_text() == text
    assert (policy.stat().st_ino, policy.stat().st_mode) == (before.st_ino, before.st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["policy-rc.d"]


def test_what_a_killed_run_left_is_taken_back(tmp_path: Path) -> None:
    policy = tmp_path / "policy-rc.d"
    with services_forbidden(policy):
        ours = policy.read_text()
    write(policy, ours)
    with services_forbidden(policy):
        pass
    assert not policy.exists()


def test_a_policy_that_a_killed_run_had_moved_aside_is_put_back(tmp_path: Path) -> None:
    policy = tmp_path / "policy-rc.d"
    write(policy, ALLOWING)
    with services_forbidden(policy):
        ours = policy.read_text()
        (saved,) = [path for path in tmp_path.iterdir() if path != policy]
    policy.rename(saved)
    write(policy, ours)
    with services_forbidden(policy):
        pass
    assert policy.read_text() == ALLOWING
    assert not saved.exists()


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb here")
def test_a_program_is_taken_out_of_its_package_and_nothing_else_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, tools = tmp_path / "root", tmp_path / "tools"
    (root / "DEBIAN").mkdir(parents=True)
    fields = ("Package: thing", "Version: 1", "Architecture: all", "Maintainer: t <t@example.org>", "Description: t")
    (root / "DEBIAN" / "control").write_text("\n".join(fields) + "\n")
    (root / "DEBIAN" / "postinst").write_text(f"#!/bin/sh\ntouch {tmp_path}/installed\n")
    (root / "DEBIAN" / "postinst").chmod(0o755)
    (root / "usr" / "bin").mkdir(parents=True)
    (root / "usr" / "bin" / "thing").write_text("#!/bin/sh\necho out\n")
    subprocess.run(["dpkg-deb", "--build", str(root), str(tmp_path / "made.deb")], check=True, capture_output=True)
    tools.mkdir()
    (tools / "apt-get").write_text(
        f'#!/bin/sh\n[ "$3 $4" = "download thing" ] && cp {tmp_path}/made.deb thing_1_all.deb\n'
    )
    (tools / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    kept = tmp_path / "kept" / "program"
    assert unpack_program("thing", "usr/bin/thing", kept) == kept
    assert subprocess.run([str(kept)], capture_output=True, text=True, check=True).stdout == "out\n"
    assert list(kept.parent.iterdir()) == [kept]
    assert not (tmp_path / "installed").exists()
    for package, place in (("thing", "usr/bin/other"), ("absent", "usr/bin/thing")):
        with pytest.raises(StepFailedError, match=f"{place} of the Debian package {package} cannot be had"):
            unpack_program(package, place, tmp_path / "kept" / "none")
    assert list(kept.parent.iterdir()) == [kept]
