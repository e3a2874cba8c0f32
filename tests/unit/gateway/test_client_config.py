from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway_embedded.client_config import ClientRegistration, default_root


@pytest.fixture
def entry(tmp_path: Path) -> ClientRegistration:
    (tmp_path / "state").mkdir()
    return ClientRegistration(root=tmp_path / "openshell", name="local", note=tmp_path / "state" / "before.json")


def tree(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in sorted(root.rglob("*")) if path.is_file()}


def test_a_registration_is_what_clients_read(entry: ClientRegistration) -> None:
    entry.register(endpoint="http://127.0.0.1:1234", port=1234)
    assert entry.active_file.read_text().strip() == "local"
    assert json.loads((entry.folder / "metadata.json").read_text()) == {
        "name": "local",
        "gateway_endpoint": "http://127.0.0.1:1234",
        "is_remote": False,
        "gateway_port": 1234,
        "auth_mode": "plaintext",
    }
    assert (entry.folder / "metadata.json").stat().st_mode & 0o777 == 0o600


def test_nothing_is_left_where_nothing_was(entry: ClientRegistration) -> None:
    entry.register(endpoint="http://127.0.0.1:1", port=1)
    entry.undo()
    assert not entry.root.exists()
    assert not entry.note.exists()


def test_what_was_there_is_there_again(entry: ClientRegistration) -> None:
    other = entry.root / "gateways" / "prod"
    other.mkdir(parents=True)
    (other / "metadata.json").write_text("theirs")
    entry.active_file.write_text("prod\n")
    entry.folder.mkdir()
    (entry.folder / "metadata.json").write_text("mine, from before")
    (entry.folder / "last_sandbox").write_text("default\nalpha\n")
    before = tree(entry.root)
    entry.register(endpoint="http://127.0.0.1:1", port=1)
    assert tree(entry.root) != before
    entry.undo()
    assert tree(entry.root) == before


def test_a_choice_made_meanwhile_stays(entry: ClientRegistration) -> None:
    entry.register(endpoint="http://127.0.0.1:1", port=1)
    entry.active_file.write_text("another")
    entry.undo()
    assert entry.active_file.read_text() == "another"
    assert not entry.folder.exists()


def test_a_killed_gateway_is_undone_by_the_next_one(entry: ClientRegistration) -> None:
    entry.root.mkdir()
    entry.active_file.write_text("prod\n")
    entry.register(endpoint="http://127.0.0.1:1", port=1)
    again = ClientRegistration(root=entry.root, name="renamed", note=entry.note)
    again.register(endpoint="http://127.0.0.1:2", port=2)
    assert entry.active_file.read_text().strip() == "renamed"
    assert not entry.folder.exists()
    again.undo()
    assert tree(entry.root) == {"active_gateway": "prod\n"}


@pytest.mark.parametrize("note", ["", "{", "[]", "{}", '{"root": 1}'])
def test_an_unreadable_note_is_dropped(entry: ClientRegistration, note: str) -> None:
    entry.note.write_text(note)
    entry.register(endpoint="http://127.0.0.1:1", port=1)
    entry.undo()
    assert not entry.note.exists()


def test_the_default_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert default_root() == tmp_path / "openshell"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_root() == tmp_path / ".config" / "openshell"
