from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway_embedded.client_config import ClientRegistration, default_root
from gateway_embedded.errors import ConfigurationError


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
    entry.release()
    again = ClientRegistration(root=entry.root, name="renamed", note=entry.note)
    again.register(endpoint="http://127.0.0.1:2", port=2)
    assert entry.active_file.read_text().strip() == "renamed"
    assert not entry.folder.exists()
    again.undo()
    assert tree(entry.root) == {"active_gateway": "prod\n"}


def test_what_a_user_keeps_beside_the_entry_is_never_touched(entry: ClientRegistration) -> None:
    keys = {"mtls/tls.key": "secret", "oidc_token.json": "{}"}
    for name, content in keys.items():
        (entry.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (entry.folder / name).write_text(content)
    before = tree(entry.root)
    entry.register(endpoint="http://127.0.0.1:1", port=1)
    (entry.folder / "last_sandbox").write_text("default\nalpha\n")
    entry.undo()
    assert tree(entry.root) == before


def test_what_a_user_puts_beside_a_new_entry_stays(entry: ClientRegistration) -> None:
    entry.register(endpoint="http://127.0.0.1:1", port=1)
    (entry.folder / "notes").write_text("mine")
    entry.undo()
    assert tree(entry.root) == {"gateways/local/notes": "mine"}


def test_an_empty_root_that_was_there_stays(entry: ClientRegistration) -> None:
    entry.root.mkdir()
    entry.register(endpoint="http://127.0.0.1:1", port=1)
    entry.undo()
    assert [*entry.root.iterdir()] == []


def test_an_entry_that_another_writer_took_over_is_left_to_it(entry: ClientRegistration) -> None:
    entry.register(endpoint="http://127.0.0.1:1", port=1)
    (entry.folder / "metadata.json").write_text("theirs")
    before = tree(entry.root)
    entry.undo()
    assert tree(entry.root) == before
    assert not entry.note.exists()


def test_a_choice_that_leads_nowhere_any_more_is_undone(entry: ClientRegistration) -> None:
    entry.register(endpoint="http://127.0.0.1:1", port=1)
    (entry.folder / "metadata.json").unlink()
    entry.undo()
    assert not entry.root.exists()


def second(entry: ClientRegistration, name: str) -> ClientRegistration:
    return ClientRegistration(root=entry.root, name=name, note=entry.note.with_name(f"second-{name}.json"))


def test_two_running_gateways_do_not_share_a_name(entry: ClientRegistration) -> None:
    entry.register(endpoint="http://127.0.0.1:1", port=1)
    before = tree(entry.root)
    rival = second(entry, "local")
    with pytest.raises(ConfigurationError, match="choose another --name") as caught:
        rival.register(endpoint="http://127.0.0.1:2", port=2)
    assert caught.value.reason == "GATEWAY_NAME_IN_USE"
    assert tree(entry.root) == before
    entry.undo()
    rival.register(endpoint="http://127.0.0.1:2", port=2)
    rival.undo()
    assert not entry.root.exists()


def test_a_killed_gateway_whose_entry_is_in_use_again_waits_for_its_turn(entry: ClientRegistration) -> None:
    entry.register(endpoint="http://127.0.0.1:1", port=1)
    entry.release()
    rival = second(entry, "local")
    rival.register(endpoint="http://127.0.0.1:2", port=2)
    again = ClientRegistration(root=entry.root, name="local", note=entry.note)
    with pytest.raises(ConfigurationError, match="choose another --name"):
        again.register(endpoint="http://127.0.0.1:3", port=3)
    rival.undo()
    again.register(endpoint="http://127.0.0.1:3", port=3)
    again.undo()
    assert not entry.root.exists()


@pytest.mark.parametrize("order", ["first in, first out", "first in, last out"])
def test_gateways_of_different_names_leave_no_trace_in_any_order(entry: ClientRegistration, order: str) -> None:
    other = second(entry, "other")
    entry.register(endpoint="http://127.0.0.1:1", port=1)
    other.register(endpoint="http://127.0.0.1:2", port=2)
    for ending in (entry, other) if order == "first in, first out" else (other, entry):
        ending.undo()
        if ending is other and order == "first in, last out":
            assert entry.active_file.read_text().strip() == "local"
    assert tree(entry.root) == {}


def test_a_choice_of_what_is_no_entry_here_is_restored(entry: ClientRegistration) -> None:
    entry.root.mkdir()
    entry.active_file.write_text("of-the-system\n")
    entry.register(endpoint="http://127.0.0.1:1", port=1)
    entry.undo()
    assert tree(entry.root) == {"active_gateway": "of-the-system\n"}


def test_a_configuration_that_cannot_be_written_is_named(entry: ClientRegistration) -> None:
    entry.root.write_text("a file")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        entry.register(endpoint="http://127.0.0.1:1", port=1)


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
