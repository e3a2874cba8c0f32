from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from driver_docker.errors import InvalidRequestError
from driver_docker.quantities import (
    MIN_MEMORY_BYTES,
    MIN_NANO_CPUS,
    QuantityError,
    ResourceLimits,
    exact_integer,
    exact_numbers,
    parse_cpu_limit,
    parse_limits,
    parse_memory_limit,
)
from openshell.status import StatusCode

MIB = 2**20


@pytest.mark.parametrize(
    ("text", "nano_cpus"),
    [
        ("1", 10**9),
        ("2", 2 * 10**9),
        ("0.5", 5 * 10**8),
        (".5", 5 * 10**8),
        ("1.", 10**9),
        ("500m", 5 * 10**8),
        ("10m", MIN_NANO_CPUS),
        ("0.01", MIN_NANO_CPUS),
        ("1e1", 10**10),
        ("1E1", 10**10),
        ("100e-2", 10**9),
        ("0.0123456789", 12_345_678),
    ],
)
def test_cpu_limits(text: str, nano_cpus: int) -> None:
    assert parse_cpu_limit(text) == nano_cpus


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("128974848", 128974848),
        ("129e6", 129_000_000),
        ("129E6", 129_000_000),
        ("129M", 129_000_000),
        ("123Mi", 123 * MIB),
        ("6Mi", MIN_MEMORY_BYTES),
        ("6291456", MIN_MEMORY_BYTES),
        ("6291456000m", MIN_MEMORY_BYTES),
        ("7000k", 7_000_000),
        ("7000K", 7_000_000),
        ("1.5Gi", 3 * 2**29),
        ("0.5G", 500_000_000),
        ("1Ti", 2**40),
        ("1Pi", 2**50),
        ("1Ei", 2**60),
        ("1E", 10**18),
        ("1P", 10**15),
        ("8000Ki", 8000 * 1024),
        ("6291456.9", MIN_MEMORY_BYTES),
    ],
)
def test_field_report_73_memory_limits(text: str, size_bytes: int) -> None:
    assert parse_memory_limit(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "", " ", " 1", "1 ", "+1", "-1", "\uff11", "1_0", "0x10", "NaN", "inf", "Infinity", "1e999999999", "1e", "e3",
        "1e+", ".", "..5", "1.2.3", "1mm", "m", "1\n", "1" * 65, "1,5", "1c", "1Ki", "1k", "1M", "1Gi", "1\x00",
    ],
)  # fmt: skip
def test_malformed_cpu_limits_are_refused(text: str) -> None:
    with pytest.raises(QuantityError, match=r"resources\.cpu_limit"):
        parse_cpu_limit(text)


@pytest.mark.parametrize(
    "text",
    [
        "", " 1G", "1G ", "+1G", "-1G", "\uff11G", "1 G", "1GB", "1gi", "1g", "1mi", "1KI", "1ki", "1e6M", "1Zi", "G",
        "1u", "1n", "NaN", "1e999", "99999E", "9223372036854775808", "8Ei",
    ],
)  # fmt: skip
def test_field_report_73_malformed_or_huge_memory_limits_are_refused(text: str) -> None:
    with pytest.raises(QuantityError, match=r"resources\.memory_limit"):
        parse_memory_limit(text)


@pytest.mark.parametrize("text", ["0", "0.0000000001", "0m", "9m", "0.009999", "1e-9", "1e-99"])
def test_field_report_72_a_cpu_limit_that_would_mean_unlimited_is_refused(text: str) -> None:
    with pytest.raises(QuantityError, match="least CPU limit"):
        parse_cpu_limit(text)


@pytest.mark.parametrize("text", ["0", "0.4", "0.5", "500m", "1k", "1K", "1e3", "5Mi", "6291455", "6291455.99", "6M"])
def test_field_report_72_a_memory_limit_below_the_engines_minimum_is_refused(text: str) -> None:
    with pytest.raises(QuantityError, match="least memory limit"):
        parse_memory_limit(text)


@given(st.text(max_size=100) | st.from_regex(r"\A[0-9.eEmkKiMGTP+-]{1,12}\Z"))
@example("9" * 64)
@example("1e99")
def test_any_text_is_a_limit_in_range_or_a_typed_refusal(text: str) -> None:
    for parse, least in ((parse_cpu_limit, MIN_NANO_CPUS), (parse_memory_limit, MIN_MEMORY_BYTES)):
        try:
            value = parse(text)
        except QuantityError as error:
            assert error.status is StatusCode.FAILED_PRECONDITION
            assert len(error.public_message.encode()) <= 1024
        else:
            assert least <= value < 2**63


@given(
    st.integers(0, 10**20),
    st.integers(0, 999),
    st.sampled_from([("", 0), ("Ki", 10), ("Mi", 20), ("Gi", 30), ("Ti", 40), ("Pi", 50), ("Ei", 60)]),
)
def test_a_memory_limit_is_exact_and_never_weaker_than_asked(
    whole: int, thousandths: int, suffix: tuple[str, int]
) -> None:
    unit, power = suffix
    asked = (whole + Fraction(thousandths, 1000)) * 2**power
    try:
        size_bytes = parse_memory_limit(f"{whole}.{thousandths:03}{unit}")
    except QuantityError:
        assert asked < MIN_MEMORY_BYTES or asked > 2**63 - 1
    else:
        assert size_bytes == math.floor(asked)


@given(st.integers(MIN_NANO_CPUS, 2**40))
def test_a_cpu_limit_survives_its_decimal_form(nano_cpus: int) -> None:
    text = f"{nano_cpus // 10**9}.{nano_cpus % 10**9:09}"
    assert parse_cpu_limit(text) == nano_cpus


def test_limits_that_were_not_asked_for_are_absent() -> None:
    assert parse_limits() == ResourceLimits()
    assert parse_limits(cpu_limit="2", memory_limit="1Gi") == ResourceLimits(
        nano_cpus=2 * 10**9, memory_bytes=1024 * MIB
    )


@pytest.mark.parametrize("field", ["cpu_request", "memory_request"])
def test_requests_are_refused_because_nothing_is_reserved(field: str) -> None:
    with pytest.raises(QuantityError, match=f"{field}.*reserves no resources") as caught:
        parse_limits(**{field: "1"})
    assert caught.value.status is StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("number", "integer"), [(8080.0, 8080), (0.0, 0), (-0.0, 0), (-3.0, -3), (2.0**53 - 1, 2**53 - 1)]
)
def test_integral_struct_numbers_are_integers(number: float, integer: int) -> None:
    read = exact_integer(number, path="pids")
    assert (read, type(read), str(read)) == (integer, int, str(integer))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1.5, 2.0**53, 9007199254740993.0, 1e300, -(2.0**53)])
def test_struct_numbers_that_lost_something_are_refused(number: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"mounts\[0\]\.size_bytes") as caught:
        exact_integer(number, path="mounts[0].size_bytes")
    assert caught.value.status is StatusCode.INVALID_ARGUMENT
    assert "string" not in caught.value.message  # whoever takes integers takes no text for them


def test_nested_numbers_become_integers_and_other_values_stay() -> None:
    read = exact_numbers(
        {"a": 1.0, "b": [True, None, "8080.0", {"c": 2.0, "d": 0.5}]},
        path="driver_config",
    )
    assert read == {"a": 1, "b": [True, None, "8080.0", {"c": 2, "d": 0.5}]}
    assert isinstance(read, dict)
    assert type(read["a"]) is int
    assert read["b"][0] is True


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e300])
def test_a_bad_nested_number_is_named_by_its_path(bad: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"driver_config\.mounts\[1\]\.size_bytes"):
        exact_numbers({"mounts": [{}, {"size_bytes": bad}]}, path="driver_config")
