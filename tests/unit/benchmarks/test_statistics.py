from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks._statistics import Comparison, percentile, table


def comparison(ours: float, baseline: float, *, limit: float) -> Comparison:
    return Comparison(
        name="create",
        baseline_name="by hand",
        ours=(ours, ours, ours * 10),
        baseline=(baseline, baseline / 10, baseline),
        limit=limit,
    )


@pytest.mark.parametrize(("percent", "value"), [(50, 5), (95, 10), (90, 9), (100, 10), (1, 1)])
def test_percentiles_are_values_that_were_measured(percent: float, value: float) -> None:
    assert percentile([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], percent) == value


def test_a_percentile_of_one_sample_is_the_sample() -> None:
    assert percentile([7.5], 95) == 7.5


@pytest.mark.parametrize(("limit", "is_within"), [(1.5, True), (1.49, False)])
def test_the_ratio_of_the_medians_decides(limit: float, is_within: bool) -> None:
    one = comparison(300, 200, limit=limit)
    assert one.ratio == 1.5
    assert one.is_within is is_within
    assert (one.to_json()["ratio"], one.to_json()["within"]) == (1.5, is_within)


def test_the_table_shows_figures_ratio_limit_and_verdict_in_80_columns() -> None:
    output = io.StringIO()
    rows = [comparison(300, 200, limit=2.0), comparison(300, 200, limit=1.0)]
    Console(file=output, width=80).print(table("speed", rows))
    shown = output.getvalue()
    for part in ("create", "by hand", "300.0 ms", "3000.0 ms", "200.0 ms", "1.50", "2.00", "within", "over"):
        assert part in shown
