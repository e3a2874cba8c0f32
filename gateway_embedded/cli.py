"""The command `openshell-gateway`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

import click
import structlog
from pydantic import ValidationError

from gateway_embedded.app import Gateway
from gateway_embedded.client_config import default_root
from gateway_embedded.config import DriverPolicy, GatewayConfig, ResourceAdmission
from gateway_embedded.errors import DriverUnreachableError, GatewayError
from gateway_embedded.listen_address import split_address
from gateway_embedded.version import own_version

_OPTION_OF = {
    "listen_host": "--listen",
    "listen_port": "--listen",
    "state_dir": "--state-dir",
    "compute_driver": "--compute-driver",
    "compute_driver_socket": "--compute-driver-socket",
    "name": "--name",
    "client_config_dir": "--client-config",
}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(own_version(), prog_name="openshell-gateway")
def main() -> None:
    """OpenShell's API in one process, in front of any compute driver."""


@main.command()
@click.option(
    "--listen",
    default="127.0.0.1:17670",
    show_default=True,
    metavar="HOST:PORT",
    help="Loopback address and port; port 0 = any.",
)
@click.option("--state-dir", type=click.Path(path_type=Path), required=True, help="Owner-only folder of all state.")
@click.option(
    "--compute-driver",
    default="docker",
    show_default=True,
    metavar="NAME",
    help="The driver's name here, under which callers send options to it.",
)
@click.option("--compute-driver-socket", type=click.Path(path_type=Path), required=True, help="Socket of the driver.")
@click.option("--name", default="local", show_default=True, metavar="NAME", help="Name of this gateway for clients.")
@click.option(
    "--client-config",
    default="",
    metavar="DIR|none",
    help="Root of the clients' configuration; 'none' leaves it alone. "
    "[default: $XDG_CONFIG_HOME/openshell, else ~/.config/openshell]",
)
@click.option(
    "--allow-driver-config",
    is_flag=True,
    help="Let callers send options to the driver, such as mounts; the driver must be set to the same.",
)
@click.option(
    "--no-resource-admission",
    is_flag=True,
    help="Let callers attach volumes whatever their labels; the driver must be set to the same.",
)
@click.option(
    "--required-volume-label",
    "required_volume_labels",
    multiple=True,
    metavar="KEY=VALUE",
    help="Label that a volume needs to be attached, instead of the usual ones; may be repeated; "
    "the driver must be set to the same.",
)
@click.option(
    "--nonexpiring-gateway-tokens",
    is_flag=True,
    help="Let supervisors outlive any absence of this gateway; without it, one that is shorter than their tokens live, "
    "at most an hour.",
)
@click.option(
    "--log-level", default="info", show_default=True, type=click.Choice(["debug", "info", "warning", "error"])
)
@click.option("--log-format", default="console", show_default=True, type=click.Choice(["console", "json"]))
def serve(
    listen: str,
    state_dir: Path,
    compute_driver: str,
    compute_driver_socket: Path,
    name: str,
    client_config: str,
    allow_driver_config: bool,
    no_resource_admission: bool,
    required_volume_labels: tuple[str, ...],
    nonexpiring_gateway_tokens: bool,
    log_level: str,
    log_format: str,
) -> None:
    """Serve until SIGTERM or SIGINT."""
    configure_logs(log_level, log_format)
    try:
        host, port = split_address(listen)
        config = GatewayConfig(
            listen_host=host,
            listen_port=port,
            state_dir=state_dir.absolute(),
            compute_driver=compute_driver,
            compute_driver_socket=compute_driver_socket,
            name=name,
            client_config_dir=_client_config_dir(client_config),
            driver_policy=_driver_policy(
                allow_driver_config=allow_driver_config,
                admits_by_label=not no_resource_admission,
                labels=required_volume_labels,
            ),
            nonexpiring_gateway_tokens=nonexpiring_gateway_tokens,
        )
    except ValidationError as error:
        raise click.UsageError("; ".join(_readable(error))) from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    sys.exit(asyncio.run(run(config)))


async def run(config: GatewayConfig) -> int:
    """Run a gateway until a signal ends it; the exit code of the process."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stopping.is_set():
            os._exit(128 + number)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    gateway = Gateway(config)
    try:
        port = await gateway.start()
    except GatewayError as error:
        click.echo(f"openshell-gateway: {error.message}", err=True)
        return 1
    click.echo(f"listening on {config.endpoint(port)}")
    try:
        return await _serve(gateway, config, stopping)
    finally:
        await gateway.stop()


async def _serve(gateway: Gateway, config: GatewayConfig, stopping: asyncio.Event) -> int:
    stopped = asyncio.create_task(stopping.wait())
    work = asyncio.create_task(_until_failure(gateway))
    try:
        await asyncio.wait((stopped, work), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return 0
        try:
            work.result()
        except DriverUnreachableError as error:
            click.echo(f"openshell-gateway: {error.message}", err=True)
        except GatewayError as error:
            socket = config.compute_driver_socket
            click.echo(f"openshell-gateway: on the driver's socket {socket}: {error.message}", err=True)
        return 1
    finally:
        for task in (stopped, work):
            task.cancel()
        await asyncio.gather(stopped, work, return_exceptions=True)


async def _until_failure(gateway: Gateway) -> None:
    await gateway.connect()
    click.echo("ready")
    await gateway.failed()


def configure_logs(level: str, form: str) -> None:
    """Send logs to standard error, which leaves standard output to the lines that programs read."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if form == "json" else structlog.dev.ConsoleRenderer(colors=False)
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _client_config_dir(text: str) -> Path | None:
    if text == "none":
        return None
    return Path(text).absolute() if text else default_root()


def _driver_policy(*, allow_driver_config: bool, admits_by_label: bool, labels: tuple[str, ...]) -> DriverPolicy:
    required: dict[str, str] = {}
    for label in labels:
        key, separator, value = label.partition("=")
        if not separator or not key:
            raise ValueError(f"--required-volume-label takes KEY=VALUE, not {label!r}")
        required[key] = value
    admission = ResourceAdmission(enabled=admits_by_label)
    if required:
        admission = ResourceAdmission(enabled=admits_by_label, required_labels=required)
    return DriverPolicy(allow_driver_config=allow_driver_config, resource_admission=admission)


def _readable(error: ValidationError) -> list[str]:
    """Each fault with the option that it came by, in our own words where a check of ours found it."""
    faults = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        cause = item.get("ctx", {}).get("error")
        faults.append(f"{_OPTION_OF.get(key, key)}: {cause if isinstance(cause, ValueError) else item['msg']}")
    return faults


if __name__ == "__main__":
    main()
