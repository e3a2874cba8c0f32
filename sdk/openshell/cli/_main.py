"""Entry point: the command groups, the options they share, and how errors leave the process."""

from __future__ import annotations

import sys

import click

from openshell.cli._context import Shared
from openshell.cli._sandbox import sandbox


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "-g", "--gateway", metavar="NAME", help="A configured gateway. [env: OPENSHELL_GATEWAY; default: the active one]"
)
@click.option("--gateway-endpoint", metavar="URL", help="Address of a gateway. [env: OPENSHELL_GATEWAY_ENDPOINT]")
@click.option(
    "-w", "--workspace", metavar="NAME", default="default", show_default=True, help="Where names are looked up."
)
@click.version_option(package_name="openshell-docker", prog_name="openshell")
@click.pass_context
def cli(context: click.Context, gateway: str | None, gateway_endpoint: str | None, workspace: str) -> None:
    """Run agents in policed sandboxes."""
    context.obj = Shared(gateway=gateway, endpoint=gateway_endpoint, workspace=workspace)


cli.add_command(sandbox)


def main() -> None:
    """Run the command; errors become one line on standard error and exit code 1, misuse 2, Ctrl-C 130."""
    from openshell.errors import OpenShellError

    try:
        code = cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except OpenShellError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)
