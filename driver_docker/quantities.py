"""Kubernetes quantities and Struct numbers to the integers that an engine takes. Pure and exact.

Decisions (compute-driver contract 5.12):

===================== ================ ============== ==========================================================
Text                  CPU              Memory         Why
===================== ================ ============== ==========================================================
``2``, ``0.5``        cores            bytes          plain decimals, also ``.5`` and ``5.``
``500m``              half a core      half a byte    thousandths, as Kubernetes has it for both
``1k``, ``1K``        refused          1000           ``k`` is Kubernetes', ``K`` is what the contract lists
``M G T P E``         refused          powers of 1000 ``1E`` is an exabyte, ``1E3`` is an exponent
``Ki`` … ``Ei``       refused          powers of 1024
``129e6``, ``1e3``    cores            bytes          decimal exponents, at most two digits
``+1``, ``-1``        refused          refused        no signs
``" 1"``, ``1 Mi``    refused          refused        no white space anywhere
``1_0``, NaN           refused          refused        ASCII digits and nothing else, no full-width forms
===================== ================ ============== ==========================================================

A fraction of the engine's unit is cut off: a limit is never weaker than what was asked for. What is left must be at
least 6 MiB of memory (the engine's minimum) or a hundredth of a core (the kernel's minimum, below which the engine
would silently set no limit at all), and must fit 63 bits. Zero is refused: to the engine it means "unlimited".
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from driver_docker.errors import InvalidRequestError, PreconditionError

MIN_MEMORY_BYTES: Final = 6 * 2**20
"""The smallest memory limit that an engine accepts."""

MIN_NANO_CPUS: Final = 10_000_000
"""A hundredth of a core: the smallest quota that the kernel's scheduler accepts."""

MAX_EXACT_INTEGER: Final = 2**53
"""Largest integer that a Struct number still carries exactly."""

_MAX_VALUE: Final = 2**63 - 1
_MAX_TEXT_CHARS: Final = 64
_QUANTITY: Final = re.compile(
    r"(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE](?P<exponent>[+-]?[0-9]{1,2})|(?P<suffix>[a-zA-Z]{1,2}))?\Z",
    re.ASCII,
)
_CPU_FACTORS: Final = {"": Fraction(10**9), "m": Fraction(10**6)}
_MEMORY_FACTORS: Final = (
    {"": Fraction(1), "m": Fraction(1, 1000), "k": Fraction(1000)}
    | {unit: Fraction(1000**power) for power, unit in enumerate("KMGTPE", start=1)}
    | {f"{unit}i": Fraction(1024**power) for power, unit in enumerate("KMGTPE", start=1)}
)


class QuantityError(PreconditionError):
    """A resource quantity that this driver cannot or will not apply; answered with FAILED_PRECONDITION."""

    default_reason = "InvalidQuantity"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLimits:
    """Hard limits of a workload container. None means that no limit was asked for."""

    nano_cpus: int | None = None
    memory_bytes: int | None = None


def parse_limits(
    *, cpu_limit: str = "", memory_limit: str = "", cpu_request: str = "", memory_request: str = ""
) -> ResourceLimits:
    """Translate the four quantities of a template.

    Raises:
        QuantityError: A quantity is malformed or out of range, or a request was made: an engine reserves nothing, and
            a request that is accepted and not honoured would be a lie.
    """
    for field, text in (("resources.cpu_request", cpu_request), ("resources.memory_request", memory_request)):
        if text:
            raise QuantityError(
                f"{field} is set to {_shown(text)}, but the Docker driver reserves no resources; "
                f"leave it out or ask for a limit instead"
            )
    return ResourceLimits(
        nano_cpus=parse_cpu_limit(cpu_limit) if cpu_limit else None,
        memory_bytes=parse_memory_limit(memory_limit) if memory_limit else None,
    )


def parse_cpu_limit(text: str, *, field: str = "resources.cpu_limit") -> int:
    """Return a CPU limit in billionths of a core.

    Args:
        text: A quantity such as ``500m`` or ``1.5``.
        field: Name of the field, for the error text.

    Raises:
        QuantityError: Malformed, below `MIN_NANO_CPUS` or too large.
    """
    nano_cpus = _scaled(text, _CPU_FACTORS, field=field, expected="cores such as 500m, 0.5 or 2")
    if nano_cpus < MIN_NANO_CPUS:
        raise QuantityError(f"{field} {_shown(text)} is too small: the least CPU limit is 10m (0.01 core)")
    return nano_cpus


def parse_memory_limit(text: str, *, field: str = "resources.memory_limit") -> int:
    """Return a memory limit in bytes.

    Args:
        text: A quantity such as ``512Mi`` or ``1G``.
        field: Name of the field, for the error text.

    Raises:
        QuantityError: Malformed, below `MIN_MEMORY_BYTES` or too large.
    """
    size_bytes = _scaled(text, _MEMORY_FACTORS, field=field, expected="bytes such as 512Mi, 1G or 134217728")
    if size_bytes < MIN_MEMORY_BYTES:
        raise QuantityError(f"{field} {_shown(text)} is too small: the least memory limit is 6Mi (6291456 bytes)")
    return size_bytes


def _scaled(text: str, factors: dict[str, Fraction], *, field: str, expected: str) -> int:
    match = _QUANTITY.match(text) if len(text) <= _MAX_TEXT_CHARS else None
    factor = factors.get(match["suffix"] or "") if match else None
    if match is None or factor is None:
        raise QuantityError(f"{field} {_shown(text)} is not a quantity: expected {expected}")
    value = Fraction(match["number"]) * Fraction(10) ** int(match["exponent"] or 0) * factor
    if value > _MAX_VALUE:
        raise QuantityError(f"{field} {_shown(text)} is too large")
    return math.floor(value)


def exact_integer(number: float, *, path: str) -> int:
    """Return a Struct number as the integer that its sender meant.

    Struct numbers are doubles: 8080 arrives as 8080.0. An integral double is an integer; anything that may have lost
    something on the way is refused.

    Args:
        number: The number as received.
        path: Where it stands, for the error text, for example ``mounts[0].size_bytes``.

    Raises:
        InvalidRequestError: NaN, infinite, fractional, or beyond 2^53 in size.
    """
    if not math.isfinite(number):
        raise InvalidRequestError(f"{path} must be a whole number, not {number}")
    if number != math.floor(number):
        raise InvalidRequestError(f"{path} must be a whole number, not {number!r}")
    # 2^53 itself may have been 2^53 + 1 when it was sent.
    if abs(number) >= MAX_EXACT_INTEGER:
        raise InvalidRequestError(f"{path} is beyond 2^53 and cannot be carried exactly")
    return int(number)


def exact_numbers(value: object, *, path: str) -> object:
    """Return decoded Struct data in which integral doubles are integers, at any depth.

    Args:
        value: Mappings, lists, strings, booleans, None and numbers.
        path: Where it stands, for the error text.

    Raises:
        InvalidRequestError: A number is NaN or infinite, or an integral one is beyond 2^53; names the path.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, float) and math.isfinite(value) and value != math.floor(value):
        return value
    if isinstance(value, int | float):
        return exact_integer(value, path=path)
    if isinstance(value, dict):
        return {key: exact_numbers(item, path=f"{path}.{key}" if path else str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [exact_numbers(item, path=f"{path}[{index}]") for index, item in enumerate(value)]
    return value


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_TEXT_CHARS else text[:_MAX_TEXT_CHARS] + "…")
