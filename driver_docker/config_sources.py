"""Where the driver's configuration comes from: flags over environment over file, and words for what is wrong there."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel, ValidationError

from driver_docker.config import DriverConfig
from driver_docker.errors import ConfigurationError
from driver_docker.regular_file import read_regular

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic_core import ErrorDetails

ENVIRONMENT_PREFIX: Final = "OPENSHELL_DOCKER_DRIVER_"
"""Environment variable of a key: this prefix and the key's name in upper case; tables are JSON there."""
CONFIG_VARIABLE: Final = "OPENSHELL_DOCKER_DRIVER_CONFIG"
"""Where the TOML file is, when no flag says so."""
SHARED_SOCKET_VARIABLE: Final = "OPENSHELL_COMPUTE_DRIVER_SOCKET"
TABLES: Final = frozenset({"resource_admission", "isolation_backends"})
"""Keys whose value is a table."""
_SHOWN_CHARACTERS: Final = 40
_FLAG_NAMES: Final = {"socket_path": "--docker-socket"}
_SHARED_VARIABLES: Final = {"bind_socket": (SHARED_SOCKET_VARIABLE,), "log_level": ("OPENSHELL_LOG_LEVEL",)}


def default_state_dir(environment: Mapping[str, str]) -> Path:
    """The records' folder when none is configured (compute-driver contract 5.1)."""
    base = environment.get("XDG_STATE_HOME")
    # A relative path there is to be ignored, as the XDG specification has it.
    root = (
        Path(base) if base and base.startswith("/") else Path(environment.get("HOME") or "/root") / ".local" / "state"
    )
    return root / "openshell" / "docker-sandbox-tokens"


def load_config(
    flags: Mapping[str, Any],
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> DriverConfig:
    """Merge flags, environment and file, in this order of precedence.

    Args:
        flags: Keys given on the command line; absent ones are `None`.
        file: A TOML file whose top level is the driver's table.
        environment: The process's environment.
        defaults: What holds where no source names a key, before the model's own defaults.

    Raises:
        ConfigurationError: Naming the key, where it came from, and what it should be.
    """
    surroundings = os.environ if environment is None else environment
    merged: dict[str, Any] = {"state_dir": default_state_dir(surroundings), **(defaults or {})}
    origins: dict[str, str] = {}
    if file is not None:
        found = _from_file(file)
        merged |= found
        origins |= dict.fromkeys(found, str(file))
    found = _from_environment(surroundings)
    merged |= found
    origins |= {key: next(name for name in variables_of(key) if surroundings.get(name)) for key in found}
    found = {key: value for key, value in flags.items() if value is not None}
    merged |= found
    origins |= {key: flag_name(key) for key in found}
    try:
        return DriverConfig.model_validate(merged)
    except ValidationError as error:
        faults = _explained(error, origins)
        raise ConfigurationError("; ".join(faults), faults=faults) from None


def flag_name(key: str) -> str:
    """The flag of a key that has one."""
    return _FLAG_NAMES.get(key, "--" + key.replace("_", "-"))


def variables_of(key: str) -> tuple[str, ...]:
    """The environment variables of a key; the first that is set and not empty counts.

    `OPENSHELL_COMPUTE_DRIVER_SOCKET` is also the gateway's own variable for where it dials (compute-driver contract
    7.1), so this driver's own variable goes before it.
    """
    return (ENVIRONMENT_PREFIX + key.upper(), *_SHARED_VARIABLES.get(key, ()))


def _from_environment(surroundings: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in DriverConfig.model_fields:
        text = next((surroundings[name] for name in variables_of(key) if surroundings.get(name)), "")
        if not text:
            continue
        if key == "log_level":
            text = text.lower()
        found[key] = _json_table(key, text) if key in TABLES else text
    known = {ENVIRONMENT_PREFIX + key.upper() for key in DriverConfig.model_fields} | {CONFIG_VARIABLE}
    for name in sorted(surroundings):
        if name.startswith(ENVIRONMENT_PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigurationError(f"unknown environment variable {name}{hint}")
    return found


def _json_table(key: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigurationError(f"{key}: the environment holds a table that is not JSON") from None


def _from_file(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_regular(file).decode())
    except OSError as error:
        raise ConfigurationError(f"configuration file {file} cannot be read: {error.strerror}") from error
    except RecursionError:
        raise ConfigurationError(f"configuration file {file} is nested too deeply") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"configuration file {file} is not TOML: {error}") from error


def _explained(error: ValidationError, origins: Mapping[str, str]) -> tuple[str, ...]:
    """One clause for each fault, with the place that says so.

    A value is repeated only where it should be a number, a switch or one of a few words: any other key may hold a
    secret.
    """
    clauses = []
    for fault in error.errors(include_url=False):
        key = ".".join(str(part) for part in fault["loc"]) or "configuration"
        origin = origins.get(str(fault["loc"][0]), "") if fault["loc"] else ""
        told = f" (from {origin})" if origin else ""
        if fault["type"] == "extra_forbidden":
            clauses.append(_unknown(key, fault["input"], nested=len(fault["loc"]) > 1) + told)
        elif fault["type"] == "missing":
            clauses.append(f"{key} must be set" if len(fault["loc"]) > 1 else _missing(key))
        else:
            clauses.append(f"{key}: {_wanted(fault)}{told}")
    return tuple(clauses)


def _missing(key: str) -> str:
    return f"{key} must be set: by {flag_name(key)}, {variables_of(key)[0]} or the key {key} in the --config file"


def _unknown(key: str, value: object, *, nested: bool) -> str:
    if isinstance(value, dict) and not nested:
        return (
            f"unknown table [{key}]: the driver's keys stand at the top level of its file, without a table around them"
        )
    table, _, name = key.rpartition(".")
    near = difflib.get_close_matches(name, _keys_of(table), n=1)
    if not near:
        return f"unknown key {key}"
    return f"unknown key {key}; did you mean {f'{table}.{near[0]}' if table else near[0]}?"


def _keys_of(table: str) -> tuple[str, ...]:
    """The keys of one of the file's tables, by its path; none of one whose keys are names."""
    model: type[BaseModel] = DriverConfig
    for part in table.split(".") if table else ():
        field = model.model_fields.get(part)
        inner = field.annotation if field is not None else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return ()
        model = inner
    return tuple(model.model_fields)


def _wanted(fault: ErrorDetails) -> str:
    kind, limits = fault["type"], fault.get("ctx", {})
    shown = ""
    if isinstance(fault["input"], str | int | float):
        shown = f", not {str(fault['input'])[:_SHOWN_CHARACTERS]!r}"
    if kind.startswith("int_"):
        return f"must be a whole number{shown}"
    if kind.startswith("float_"):
        return f"must be a number{shown}"
    if kind.startswith("bool_"):
        return f"must be true or false{shown}"
    if kind == "enum":
        return f"must be one of {limits['expected']}{shown}"
    if kind == "greater_than_equal":
        return f"must be at least {limits['ge']}{shown}"
    if kind == "less_than_equal":
        return f"must be at most {limits['le']}{shown}"
    if kind in {"string_type", "path_type"}:
        return "must be a text"
    return fault["msg"].removeprefix("Value error, ")
