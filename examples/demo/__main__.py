"""Run the demo: ``python -m examples.demo --workload-image … --runtime-image … --supervisor-image …``."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click
import docker
from rich.console import Console

from examples.demo.leftovers import Inventory, LeftOver, remove_earlier
from examples.demo.processes import CommandError, command
from examples.demo.road import Road
from examples.demo.story import Outcome, launch_and_kill, launch_without_road
from openshell import Goal, OpenShell, WatchEvent
from openshell.errors import OpenShellError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

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
    engine = docker.APIClient(version="auto", base_url=os.environ.get("DOCKER_HOST"))
    with contextlib.closing(engine), _only_one(), tempfile.TemporaryDirectory(prefix="openshell-demo-") as folder:
        root = Path(folder)
        for name in remove_earlier(engine, NAMESPACE):
            console.print(f"removed {name}, left by a killed run")
        inventory = Inventory(engine, NAMESPACE, root, root / "state")
        inventory.state.mkdir()
        inventory.begin()
        try:
            images = {"runtime": runtime_image, "supervisor": supervisor_image, "workload": workload_image}
            outcomes = _play(console, inventory, images)
        except (OpenShellError, CommandError) as error:
            raise click.ClickException(str(error)) from error
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
        stack.callback(_delete_all, client)
        openshell = str(Path(sys.executable).with_name("openshell"))

        console.print(f"[bold]2/5[/] launch sandbox [cyan]{LOST}[/] and kill its supervisor with SIGKILL, from outside")
        with _progress(console, inventory, LOST) as show:
            first = launch_and_kill(client, engine, name=LOST, image=images["workload"], show=show)
        console.print(f"    Ready after {first.created_to_ready_ms} ms")
        console.print(f"    the verdict came {first.exit_to_event_ms} ms after the exit")
        _show_get(console, openshell, LOST, environment)

        console.print(f"[bold]3/5[/] close the road to the gateway and launch sandbox [cyan]{CUT_OFF}[/]")
        road.close()
        with _progress(console, inventory, CUT_OFF) as show:
            second = launch_without_road(client, name=CUT_OFF, image=images["workload"], show=show)
        _show_get(console, openshell, CUT_OFF, environment)

        console.print("[bold]4/5[/] delete both sandboxes, stop driver and gateway")
        _delete_all(client)
    return [first, second]


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


def _delete_all(client: OpenShell) -> None:
    for name in (LOST, CUT_OFF):
        client.sandboxes.delete(name, allow_missing=True)
        client.sandboxes.wait(name, Goal.DELETED, timeout_seconds=60)


@contextlib.contextmanager
def _progress(console: Console, inventory: Inventory, name: str) -> Iterator[WatchShow]:
    with console.status(f"{name}: asking the gateway") as status:

        def show(event: WatchEvent) -> None:
            if event.event is not None:
                inventory.note_containers()
                metadata = event.event.metadata
                detail = metadata.get("openshell.progress.active_detail") or event.event.message
                status.update(f"{name}: {event.event.reason} {detail}")
                if not console.is_terminal:
                    console.print(f"    {event.event.reason}: {detail}")

        yield show


def _show_get(console: Console, openshell: str, name: str, environment: Mapping[str, str]) -> None:
    shown = subprocess.run(
        [openshell, "sandbox", "get", name], env=dict(environment), capture_output=True, text=True, check=False
    )
    console.print(f"    $ openshell sandbox get {name}", style="dim")
    for line in (shown.stdout + shown.stderr).splitlines():
        console.print(f"    {line}", markup=False)


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
def _only_one() -> Iterator[None]:
    path = Path(tempfile.gettempdir()) / f"{NAMESPACE}-{os.getuid()}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise click.ClickException("another demo is running on this machine; wait until it has ended") from error
        yield
    finally:
        os.close(descriptor)
        # The file stays: removing it would let two later runs lock two different files of the same name.


if __name__ == "__main__":
    main()
