"""Command-line options made from the configuration, so that flags, environment and file cannot drift apart."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, Union, get_args, get_origin

import click

from driver_docker.config import DriverConfig
from driver_docker.config_sources import CONFIG_VARIABLE, flag_name, load_config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_SCALARS: Final = (str, Path, int, float, bool)
UNSET_SOCKET: Final = Path("/nonexistent/bind_socket-is-not-set")
"""Stands for the socket in commands that do not serve."""

_OUTPUT: Final = f"{__name__}.output"


class OutputFormat(StrEnum):
    """What a command prints."""

    TABLE = "table"
    JSON = "json"


def flag_of(key: str) -> str | None:
    """The flag of a configuration key; `None` for a table, which a file or the environment holds."""
    kinds = _kinds(key)
    if any(isinstance(kind, type) and issubclass(kind, _SCALARS) for kind in kinds):
        return flag_name(key)
    return None


def _kinds(key: str) -> tuple[Any, ...]:
    """The types that a key's annotation is made of, `Annotated` and unions taken apart."""
    pending, found = [DriverConfig.model_fields[key].annotation], []
    while pending:
        annotation = pending.pop()
        if hasattr(annotation, "__metadata__"):
            pending += get_args(annotation)[:1]
        elif get_origin(annotation) in {Union, UnionType}:
            pending += get_args(annotation)
        else:
            found.append(get_origin(annotation) or annotation)
    return tuple(found)


def _metavar(key: str) -> str | None:
    """What stands for the value in `--help`; none for a switch."""
    kinds = [kind for kind in _kinds(key) if isinstance(kind, type)]
    for kind, word in ((bool, None), (Path, "PATH"), (int, "NUMBER"), (float, "NUMBER")):
        if any(issubclass(found, kind) for found in kinds):
            return word
    choices = [member.value for kind in kinds if issubclass(kind, StrEnum) for member in kind]
    return f"[{'|'.join(choices)}]" if choices else "TEXT"


def _default_text(key: str) -> str:
    field = DriverConfig.model_fields[key]
    default = None if field.is_required() else field.get_default()
    if default is None:
        return ""
    if isinstance(default, bool):
        default = "on" if default else "off"
    return f"  [default: {default}]"


def config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command `--config`, every configuration flag, and `-o`."""
    for key in reversed(DriverConfig.model_fields):
        flag = flag_of(key)
        if flag is None:
            continue
        help_text = (DriverConfig.model_fields[key].description or "").replace("`", "")
        is_switch = bool in _kinds(key)
        declared = f"{flag}/--no-{flag.removeprefix('--')}" if is_switch else flag
        help_text = " ".join(help_text.split()) + _default_text(key)
        command = click.option(declared, key, default=None, metavar=_metavar(key), help=help_text)(command)
    command = click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path, dir_okay=False),
        envvar=CONFIG_VARIABLE,
        help="TOML file with these keys at its top level; see the driver's README.",
    )(command)
    return click.option(
        "-o",
        "--output",
        type=click.Choice([member.value for member in OutputFormat]),
        default=OutputFormat.TABLE.value,
        show_default=True,
        callback=_remember_output,
        help="What is printed on standard output.",
    )(command)


def _remember_output(context: click.Context, _: click.Parameter, value: str) -> str:
    context.meta[_OUTPUT] = value
    return value


def output_of(context: click.Context) -> OutputFormat:
    """What a command was told to print, also once it has failed; a table where it did not come to that."""
    return OutputFormat(context.meta.get(_OUTPUT, OutputFormat.TABLE))


def load(flags: Mapping[str, Any], *, file: Path | None, serves: bool) -> DriverConfig:
    """The configuration of a command.

    Args:
        flags: The values of `config_options`.
        file: The value of `--config`.
        serves: Whether the command needs a socket; others get `UNSET_SOCKET` where none is configured.

    Raises:
        ConfigurationError: A source holds what cannot be used.
    """
    return load_config(flags, file=file, defaults={} if serves else {"bind_socket": UNSET_SOCKET})
