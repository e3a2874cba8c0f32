"""The command line: every flag, both outputs, exit codes, and that looking makes nothing."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from driver_docker.cli import main
from driver_docker.cli_options import flag_of
from driver_docker.cli_output import print_table
from driver_docker.config import DriverConfig
from driver_docker.encode import own_version
from driver_docker.exit_journal import ExitJournal, JournalEntry
from driver_docker.records import RecordStore
from driver_docker.sandbox_record import RecordPhase, SandboxRecord

AT = datetime(2026, 10, 5, 12, tzinfo=UTC)
COMMANDS = ("serve", "check", "sandboxes", "exits", "gc")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("driver_docker.engine_address._FIRST_SOCKET", tmp_path / "usual.sock")
    environment = {
        "HOME": str(tmp_path),
        "OPENSHELL_DOCKER_DRIVER_STATE_DIR": str(tmp_path / "state"),
        "DOCKER_HOST": f"unix://{tmp_path}/none.sock",
        "XDG_RUNTIME_DIR": None,
        "DOCKER_CONTEXT": None,
        "DOCKER_CONFIG": None,
        "OPENSHELL_COMPUTE_DRIVER_SOCKET": None,
    }

    def run_(*arguments: str, **more: str) -> Result:
        return CliRunner().invoke(main, list(arguments), env=environment | more)

    return run_


def exit_entry(sandbox_id: str = "sb-1", tail: str = "first\nlast \x1b[31mred\n") -> JournalEntry:
    return JournalEntry(
        at=AT,
        sandbox_id=sandbox_id,
        name="steady",
        workspace="default",
        message="exited with code 6",
        verdict={"openshell.verdict.kind": "exited", "openshell.verdict.exit_code": "6"},
        tail=tail,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_every_scalar_key_and_the_output(command: str) -> None:
    group = main
    assert isinstance(group, click.Group)
    offered = {name for param in group.commands[command].params for name in param.opts}
    wanted = {flag for key in DriverConfig.model_fields if (flag := flag_of(key)) is not None}
    assert wanted | {"-o", "--config"} <= offered
    assert set(group.commands) == set(COMMANDS)


def test_tables_have_no_flag() -> None:
    assert (flag_of("resource_admission"), flag_of("isolation_backends")) == (None, None)
    assert (flag_of("socket_path"), flag_of("sandbox_label")) == ("--docker-socket", "--sandbox-label")


@pytest.mark.parametrize("command", COMMANDS[2:])
def test_a_wrong_configuration_is_one_line_and_exit_2(run: Any, command: str) -> None:
    result = run(command, "--sandbox-pids-limit", "0")
    assert result.exit_code == 2
    assert result.stderr.startswith("openshell-driver-docker: sandbox_pids_limit")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("sandbox_pids_limit", "many", "must be a whole number, not 'many'"),
        ("sandbox_pids_limit", "0", "must be at least 1, not '0'"),
        ("resync_interval_seconds", "x", "must be a number, not 'x'"),
        ("staging", "fat", "must be one of 'lean' or 'upstream', not 'fat'"),
        ("https_proxy", "http://me:s3cret@h:1", "https_proxy"),
    ],
)
def test_a_wrong_value_is_told_with_what_it_should_be_and_where_it_is_from(
    run: Any, tmp_path: Path, key: str, value: str, words: str
) -> None:
    file, variable = tmp_path / "d.toml", f"OPENSHELL_DOCKER_DRIVER_{key.upper()}"
    file.write_text(f'{key} = "{value}"\n')
    flag = flag_of(key)
    assert flag is not None
    by_file, by_flag = run("exits", "--config", str(file)), run("exits", flag, value)
    for result, origin in ((by_file, str(file)), (run("exits", **{variable: value}), variable), (by_flag, flag)):
        assert result.exit_code == 2
        assert words in result.stderr
        assert "s3cret" not in result.stderr
        if key != "https_proxy":  # it is judged together with others
            assert f"(from {origin})" in result.stderr


@pytest.mark.parametrize("table", ["openshell.drivers.docker", "docker"])
def test_a_file_with_a_table_around_the_keys_is_told_so(run: Any, tmp_path: Path, table: str) -> None:
    file = tmp_path / "d.toml"
    file.write_text(f'[{table}]\nsandbox_label = "x"\n')
    assert "stand at the top level" in run("exits", "--config", str(file)).stderr


def test_the_version_is_told(run: Any) -> None:
    assert run("--version").stdout == f"openshell-driver-docker {own_version()}\n"


def test_help_names_allowed_values_and_defaults(run: Any) -> None:
    shown = " ".join(run("serve", "--help").stdout.split())
    for part in ("[lean|upstream]", "[refuse|serve]", "[enforce|warn]", "[last-line|none]", "[default: 2048]"):
        assert part in shown
    assert "ours" not in shown.split()
    assert "contract 3" not in shown


def test_unknown_variables_are_refused_with_a_suggestion(run: Any) -> None:
    result = run("exits", OPENSHELL_DOCKER_DRIVER_SANDBOX_LABLE="x")
    assert result.exit_code == 2
    assert "did you mean OPENSHELL_DOCKER_DRIVER_SANDBOX_LABEL?" in result.stderr


@pytest.mark.parametrize("command", ["serve", "sandboxes", "exits", "gc"])
def test_with_json_output_an_error_is_a_document_too(run: Any, tmp_path: Path, command: str) -> None:
    file = tmp_path / "d.toml"
    file.write_text("sandbox_lable = 'x'\n")
    result = run(command, "-o", "json", "--config", str(file))
    told = json.loads(result.stdout)["error"]
    assert result.exit_code == 2
    assert "did you mean sandbox_label?" in told["message"]
    assert told["message"] in result.stderr
    assert told["reason"]


def test_serve_needs_a_socket(run: Any) -> None:
    result = run("serve")
    assert (result.exit_code, "bind_socket must be set" in result.stderr) == (2, True)


@pytest.mark.parametrize("place", ["d.sock", "/run/" + "s" * 120])
def test_a_socket_that_cannot_be_is_told_by_its_option_before_an_engine_is_looked_for(run: Any, place: str) -> None:
    result = run("serve", "--bind-socket", place)
    assert result.exit_code == 2
    assert result.stderr.startswith("openshell-driver-docker: --bind-socket")


def test_a_long_cell_moves_only_its_own_row(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("A", "B"), [("x" * 400, "y\nz"), ("short", "b")], empty="none")
    assert capsys.readouterr().out.splitlines() == [
        "A" + " " * 41 + "B",
        "x" * 400 + "  y z",
        "short" + " " * 37 + "b",
    ]
    print_table(("A", "B"), [], empty="none")
    assert capsys.readouterr() == ("", "none\n")


def test_exits_are_shown_with_their_tails_and_without_terminal_controls(run: Any, tmp_path: Path) -> None:
    folder = tmp_path / "state" / "default"
    RecordStore(folder).open()
    for number in range(25):
        ExitJournal(folder).append(exit_entry(f"sb-{number % 2}"))
    result = run("exits")
    assert result.exit_code == 0
    assert result.stdout.count("exited with code 6") == 20
    assert "  | last \N{REPLACEMENT CHARACTER}[31mred" in result.stdout
    assert "\x1b" not in result.stdout
    shown = json.loads(run("exits", "sb-0", "-o", "json").stdout)["exits"]
    assert [entry["sandbox_id"] for entry in shown] == ["sb-0"] * 13
    assert shown[0]["tail"] == "first\nlast \x1b[31mred\n"
    assert json.loads(run("exits", "none", "-o", "json").stdout)["exits"] == []


@pytest.mark.parametrize("sandbox", ["007a5e53-1", "007a", "steady", "default/steady"])
def test_exits_of_a_sandbox_are_found_by_what_names_it(run: Any, tmp_path: Path, sandbox: str) -> None:
    folder = tmp_path / "state" / "default"
    RecordStore(folder).open()
    ExitJournal(folder).append(exit_entry("007a5e53-1"))
    assert "exited with code 6" in run("exits", sandbox).stdout


def test_a_sandbox_without_exits_is_told_as_that(run: Any, tmp_path: Path) -> None:
    folder = tmp_path / "state" / "default"
    RecordStore(folder).open()
    ExitJournal(folder).append(exit_entry())
    result = run("exits", "nope")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no exits are recorded of nope" in result.stderr
    assert run("exits", "nope", "-o", "json").exit_code == 1
    assert run("exits").exit_code == 0


def test_sandboxes_are_shown_without_a_driver_and_without_an_engine(run: Any, tmp_path: Path) -> None:
    folder = tmp_path / "state" / "default"
    store = RecordStore(folder)
    store.open()
    store.save(
        SandboxRecord(
            sandbox_id="sb-1",
            name="steady",
            workspace="default",
            phase=RecordPhase.STOPPED,
            changed_at=AT,
            workload_id="abc",
        )
    )
    store.save_files("sb-2", {"record.json": b"{"})
    result = run("sandboxes")
    assert result.exit_code == 1, "the engine cannot be asked"
    assert "no driver runs here" in result.stderr
    assert "default/steady" in result.stdout
    assert "sandbox sb-2 is left alone: record" in result.stderr
    assert "the engine was not asked" in result.stderr
    document = json.loads(run("sandboxes", "-o", "json").stdout)
    assert document["driver_runs"] is False
    (shown,) = document["sandboxes"]
    assert (shown["phase"], shown["reason"]) == ("stopped", "ContainerStopped")
    assert shown["workload"] == {"id": "abc", "state": "unknown"}
    assert shown["supervisor"]["state"] == "-"
    assert [each["sandbox_id"] for each in document["unreadable"]] == ["sb-2"]


@pytest.mark.parametrize("arguments", [("sandboxes",), ("exits",), ("check",), ("gc", "--dry-run")])
def test_looking_makes_nothing(run: Any, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    run(*arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["sandboxes", "exits"])
def test_a_state_folder_that_cannot_be_read_is_one_line(run: Any, tmp_path: Path, command: str) -> None:
    (tmp_path / "state").write_text("no folder")
    result = run(command)
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert f"{tmp_path}/state/default" in result.stderr
    assert "cannot be read" in result.stderr


def test_gc_without_an_engine_fails_and_says_where_it_looked(run: Any, tmp_path: Path) -> None:
    result = run("gc")
    assert result.exit_code == 1
    assert "none.sock" in result.stderr


def test_check_fails_with_rows_also_where_the_configuration_is_wrong(run: Any) -> None:
    result = run("check", "-o", "json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["ok"] is False
    faults = [finding["check"] for finding in document["findings"] if finding["level"] == "fault"]
    assert faults[0] == "bind_socket"
    assert "engine" in faults
    wrong = run("check", "--grpc-endpoint", "nonsense")
    assert wrong.exit_code == 2
    assert "grpc_endpoint" in wrong.stdout
    both = run("check", "-o", "json", "--grpc-endpoint", "nonsense", "--sandbox-pids-limit", "x")
    assert len(json.loads(both.stdout)["findings"]) == 2, "a row for each fault"
