"""The `openshell-driver-docker` command. Thin: options to configuration, errors to exit codes."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

import click
import structlog

from driver_docker.config import load_config
from driver_docker.errors import ConfigurationError, DriverError

EXIT_CONFIGURATION = 2
EXIT_FAILURE = 1


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Docker compute driver for OpenShell gateways."""


@main.command()
@click.option("--bind-socket", type=click.Path(path_type=Path), help="Unix socket to serve on.")
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="OPENSHELL_DOCKER_DRIVER_CONFIG",
    help="TOML file with the driver's table.",
)
@click.option("--docker-socket", "socket_path", help="Docker's API socket or address; found by itself when absent.")
@click.option("--grpc-endpoint", help="Where supervisors reach the gateway, for example http://127.0.0.1:17670.")
@click.option("--supervisor-image", help="Image of the control supervisor.")
@click.option("--sandbox-runtime-image", help="Image that holds the sandbox runtime.")
@click.option("--default-image", help="Workload image where the caller names none.")
@click.option("--sandbox-label", help="Namespace of this driver's containers on the engine.")
@click.option("--state-dir", type=click.Path(path_type=Path), help="Owner-only folder of records.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Threshold of the log.")
def serve(config_file: Path | None, **flags: Any) -> None:
    """Serve openshell.compute.v1 on a Unix socket until SIGTERM."""
    try:
        config = load_config(flags, file=config_file)
        configure_log(config.log_level.value)
        from driver_docker.serve import serve as run

        asyncio.run(run(config, announce=click.echo))
    except ConfigurationError as error:
        click.echo(f"openshell-driver-docker: {error.public_message}", err=True)
        sys.exit(EXIT_CONFIGURATION)
    except DriverError as error:
        click.echo(f"openshell-driver-docker: {error.public_message}", err=True)
        sys.exit(EXIT_FAILURE)


def configure_log(level: str) -> None:
    """Structured lines on standard error: JSON, or readable where that is a terminal."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if sys.stderr.isatty():
        shared.append(structlog.dev.ConsoleRenderer())
    else:
        shared += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=shared,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
