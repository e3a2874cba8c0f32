"""The `openshell-driver-docker` command. Thin: options to configuration, errors to exit codes."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

import click
import structlog

from driver_docker import cli_reports
from driver_docker.bind_socket import check_path
from driver_docker.cli_options import OutputFormat, config_options, load, output_of
from driver_docker.cli_output import print_json
from driver_docker.config import LogLevel
from driver_docker.errors import ConfigurationError, DriverError
from driver_docker.exit_codes import ExitCode

if TYPE_CHECKING:
    from pathlib import Path


class _Commands(click.Group):
    """Commands whose own errors become one line, with JSON output one document as well, and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DriverError as error:
            click.echo(f"openshell-driver-docker: {error.public_message}", err=True)
            if output_of(ctx) is OutputFormat.JSON:
                print_json({"error": {"reason": error.reason, "message": error.public_message}})
            sys.exit(ExitCode.CONFIGURATION if isinstance(error, ConfigurationError) else ExitCode.FAULT)


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    from driver_docker.encode import own_version

    click.echo(f"openshell-driver-docker {own_version()}")
    context.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version."
)
def main() -> None:
    """Docker compute driver for OpenShell gateways.

    Exit codes: 0 fine, 1 a fault was found or the driver failed, 2 the configuration cannot be used.
    """
    configure_log(LogLevel.WARN)


@main.command()
@config_options
def serve(config_file: Path | None, output: str, **flags: Any) -> None:
    """Serve openshell.compute.v1 on a Unix socket until SIGTERM."""
    config = load(flags, file=config_file, serves=True)
    check_path(config.bind_socket)  # before an engine is looked for
    configure_log(config.log_level)
    from driver_docker.serve import serve as run

    def announce(line: str) -> None:
        if output == OutputFormat.JSON.value:
            line = json.dumps({"event": "serving", "bind_socket": str(config.bind_socket)})
        click.echo(line)

    asyncio.run(run(config, announce=announce))


for _command in (cli_reports.check, cli_reports.sandboxes, cli_reports.exits, cli_reports.gc):
    main.add_command(_command)


def configure_log(level: LogLevel) -> None:
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
        wrapper_class=structlog.make_filtering_bound_logger(level.own),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
