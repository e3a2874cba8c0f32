"""Run the demo: ``python -m examples.demo --workload-image … --runtime-image … --supervisor-image …``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click
import docker
import docker.errors
from rich.console import Console
from rich.markup import escape

from examples.demo.leftovers import Inventory, LeftOver, held_folder, remove_earlier, remove_folders
from examples.demo.processes import Command, CommandError, command
from examples.demo.road import Road
from examples.demo.story import Outcome, launch_and_kill, launch_without_road
from openshell import Goal, OpenShell, WatchEvent
from openshell.errors import OpenShellError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import FrameType

    WatchShow = Callable[[WatchEvent], None]

NAMESPACE = "openshell-demo"
LOST, CUT_OFF = "lost-supervisor", "cut-off"


@click.command()
@click.option("--workload-image", required=True, metavar="REF", help="Image in which the agent runs.")
@click.option("--runtime-image", required=True, metavar="REF", help="Image that holds the sandbox runtime.")
@click.option("--supervisor-image", required=True, metavar="REF", help="Image of the control supervisor.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, last on standard output.")
@click.option(
    "--keep-logs", type=click.Path(path_type=Path), help="Copy the logs of gateway and driver to this folder."
)
def main(workload_image: str, runtime_image: str, supervisor_image: str, as_json: bool, keep_logs: Path | None) -> None:
    """Launch a sandbox, lose its supervisor, read why."""
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    _unwind_on_signals()
    with contextlib.ExitStack() as stack:
        try:
            engine = stack.enter_context(
                contextlib.closing(docker.APIClient(version="auto", base_url=os.environ.get("DOCKER_HOST")))
            )
            engine_id = str(engine.info()["ID"])
        except docker.errors.DockerException as error:
            raise click.ClickException(f"no Docker Engine answers: {error}") from error
        stack.enter_context(_only_one(f"{NAMESPACE}-{engine_id}"))
        folders = remove_folders(Path(tempfile.gettempdir()), f"{NAMESPACE}-")
        for removed in (*remove_earlier(engine, NAMESPACE), *folders):
            console.print(f"removed {removed}, left by a killed run", markup=False)
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{NAMESPACE}-")))
        stack.enter_context(held_folder(root))
        inventory = Inventory(engine, NAMESPACE, root, root / "state")
        inventory.state.mkdir()
        inventory.begin()
        try:
            images = {"runtime": runtime_image, "supervisor": supervisor_image, "workload": workload_image}
            outcomes = _play(console, inventory, images)
        except (OpenShellError, CommandError, docker.errors.DockerException, OSError) as error:
            _remove_by_engine(console, engine)
            raise click.ClickException(str(error)) from error
        except SystemExit:
            _remove_by_engine(console, engine)
            raise
        finally:
            if keep_logs is not None:
                keep_logs.mkdir(parents=True, exist_ok=True)
                for log in root.glob("*.log"):
                    (keep_logs / log.name).write_bytes(log.read_bytes())
        left = inventory.left()
    _report_left(console, left)
    if as_json:
        print(json.dumps({"sandboxes": [_facts(one) for one in outcomes], "left_over": asdict(left)}))
    if not left.nothing:
        sys.exit(1)


def _play(console: Console, inventory: Inventory, images: Mapping[str, str]) -> list[Outcome]:
    root, state, engine = inventory.root, inventory.state, inventory.engine
    environment = {**os.environ, "XDG_CONFIG_HOME": str(root / "config"), "XDG_STATE_HOME": str(state)}
    environment.pop("OPENSHELL_GATEWAY", None)
    environment.pop("OPENSHELL_GATEWAY_ENDPOINT", None)
    socket = root / "driver.sock"
    with contextlib.ExitStack() as stack:
        console.print("[bold]1/5[/] start a gateway and the Docker compute driver")
        gateway = stack.enter_context(
            command(
                "openshell-gateway",
                _gateway_arguments(state, socket),
                environment=environment,
                log_path=root / "gateway.log",
            )
        )
        endpoint = gateway.expect("listening on ")
        address = urlsplit(endpoint)
        road = stack.enter_context(Road(address.hostname or "127.0.0.1", address.port or 0))
        driver = stack.enter_context(
            command(
                "openshell-driver-docker",
                _driver_arguments(state, socket, road.endpoint, images),
                environment=environment,
                log_path=root / "driver.log",
            )
        )
        driver.expect("serving on ")
        gateway.expect("ready")
        console.print(f"    gateway at {endpoint}, driver at {socket}")
        client = stack.enter_context(OpenShell(endpoint))
        for one in (gateway, driver):
            one.on_end = client.close  # nothing waits for an answer that cannot come
            stack.enter_context(_named_as_the_cause(one))
        stack.callback(_try_delete_all, client)
        openshell = str(Path(sys.executable).with_name("openshell"))

        console.print(f"[bold]2/5[/] launch sandbox [cyan]{LOST}[/] and kill its supervisor with SIGKILL, from outside")
        with _progress(console, inventory, f"{LOST}: asking the gateway") as show:
            first = launch_and_kill(client, engine, name=LOST, image=images["workload"], show=show)
        console.print(f"    Ready after {first.created_to_ready_ms} ms")
        console.print(f"    the engine's own wait answers {json.dumps(first.engine_wait)}, and no text")
        console.print(f"    the verdict came {first.exit_to_event_ms} ms after the exit")
        _show_get(console, openshell, LOST, environment)

        console.print(f"[bold]3/5[/] close the road to the gateway and launch sandbox [cyan]{CUT_OFF}[/]")
        road.close()
        console.print("    its supervisor tries for about ten seconds, then gives up by itself")
        with _progress(console, inventory, f"{CUT_OFF}: asking the gateway") as show:
            second = launch_without_road(client, name=CUT_OFF, image=images["workload"], show=show)
        _show_get(console, openshell, CUT_OFF, environment)

        console.print("[bold]4/5[/] delete both sandboxes, stop driver and gateway")
        _delete_all(client)
    return [first, second]


@contextlib.contextmanager
def _named_as_the_cause(running: Command) -> Iterator[None]:
    """Where a call failed since a command had died, say that instead."""
    try:
        yield
    except OpenShellError:
        running.raise_if_ended()
        raise


def _gateway_arguments(state: Path, socket: Path) -> list[str]:
    options = {
        "--listen": "127.0.0.1:0",
        "--state-dir": str(state.parent / "gateway"),  # its own database and key stay its own
        "--name": "demo",
        "--compute-driver": "docker",
        "--compute-driver-socket": str(socket),
    }
    return ["serve", *(word for option in options.items() for word in option)]


def _driver_arguments(state: Path, socket: Path, endpoint: str, images: Mapping[str, str]) -> list[str]:
    options = {
        "--bind-socket": str(socket),
        "--grpc-endpoint": endpoint,
        "--sandbox-label": NAMESPACE,
        "--state-dir": str(state / "driver"),
        "--supervisor-image": images["supervisor"],
        "--sandbox-runtime-image": images["runtime"],
    }
    return ["serve", *(word for option in options.items() for word in option)]


def _delete_all(client: OpenShell, timeout_seconds: float = 60.0) -> None:
    for name in (LOST, CUT_OFF):
        client.sandboxes.delete(name, allow_missing=True, timeout_seconds=timeout_seconds)
        client.sandboxes.wait(name, Goal.DELETED, timeout_seconds=timeout_seconds)


def _try_delete_all(client: OpenShell) -> None:
    """Delete in order where gateway and driver still can; what they cannot, `_remove_by_engine` does afterwards."""
    with contextlib.suppress(OpenShellError):
        _delete_all(client, timeout_seconds=10.0)


def _remove_by_engine(console: Console, engine: docker.APIClient) -> None:
    """Remove what a run that broke off left, without gateway and driver, which may be what broke."""
    try:
        for removed in remove_earlier(engine, NAMESPACE):
            console.print(f"removed {removed}, left by this run", markup=False)
    except (docker.errors.DockerException, OSError) as error:
        console.print(f"what this run left could not be removed, the next one will try again: {error}", markup=False)


@contextlib.contextmanager
def _progress(console: Console, inventory: Inventory, begin: str) -> Iterator[WatchShow]:
    with console.status(begin) as status:

        def show(event: WatchEvent) -> None:
            if event.step:
                inventory.note_containers()
                status.update(escape(event.step))
                if not console.is_terminal:
                    console.print(f"    {event.step}", markup=False)

        yield show


def _show_get(console: Console, openshell: str, name: str, environment: Mapping[str, str]) -> None:
    shown = subprocess.run(
        [openshell, "sandbox", "get", name], env=dict(environment), capture_output=True, text=True, check=False
    )
    console.print(f"    $ openshell sandbox get {name}", style="dim")
    for line in (shown.stdout + shown.stderr).splitlines():
        for row in _rows(f"    {line}", console.width if console.is_terminal else None):
            console.print(row, markup=False)


def _rows(line: str, width: int | None) -> list[str]:
    """A line broken between words to a terminal's width, what follows indented further; whole without a width."""
    if width is None or len(line) <= width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(
        line.lstrip(),
        max(width, 40),
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _report_left(console: Console, left: LeftOver) -> None:
    if left.nothing:
        console.print("[bold]5/5[/] nothing is left: no container, volume, network, state folder or process")
        return
    for kind, names in asdict(left).items():
        if names:
            console.print(f"[bold red]left over[/] {kind}: {', '.join(names)}")


def _facts(outcome: Outcome) -> dict[str, object]:
    verdict = outcome.verdict
    return {
        "name": outcome.name,
        "phase": outcome.phase,
        "reason": outcome.reason,
        "message": outcome.message,
        "verdict": None
        if verdict is None
        else {
            "kind": verdict.kind.value,
            "exit_code": verdict.exit_code,
            "signal": verdict.signal,
            "killed_by": verdict.killed_by.value if verdict.killed_by else None,
            "finished_at": verdict.finished_at.isoformat() if verdict.finished_at else None,
            "words": verdict.words,
        },
        "created_to_ready_ms": outcome.created_to_ready_ms,
        "exit_to_event_ms": outcome.exit_to_event_ms,
    }


@contextlib.contextmanager
def _only_one(name: str) -> Iterator[None]:
    """Refuse a second demo on the same engine. The name is an abstract socket's, which no death leaves behind."""
    with socket.socket(socket.AF_UNIX) as held:
        try:
            held.bind(f"\0{name}")
        except OSError as error:
            raise click.ClickException("another demo is running on this engine; wait until it has ended") from error
        yield


def _unwind_on_signals() -> None:
    """Let the first ending signal unwind what was built up; those that follow must not cut the clean-up short."""
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def ignore(_number: int, _frame: FrameType | None) -> None:
        """Instead of SIG_IGN, of which Python complains where a signal is waiting already."""

    def unwind(number: int, _frame: FrameType | None) -> None:
        for one in ending:
            signal.signal(one, ignore)
        sys.exit(128 + number)

    for one in ending:
        signal.signal(one, unwind)


if __name__ == "__main__":
    main()
