"""Medians, percentiles and the verdict on a ratio."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that this many percent of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One measure of ours beside its baseline, both taken in this run, in milliseconds."""

    name: str
    baseline_name: str
    ours_milliseconds: tuple[float, ...]
    baseline_milliseconds: tuple[float, ...]
    limit: float
    """Highest ratio of the medians that is accepted."""

    @property
    def ratio(self) -> float:
        """Our median over the baseline's."""
        return statistics.median(self.ours_milliseconds) / statistics.median(self.baseline_milliseconds)

    @property
    def is_within(self) -> bool:
        """Whether the limit is kept."""
        return self.ratio <= self.limit

    def to_json(self) -> dict[str, object]:
        """Everything about it, for a program."""
        return {
            "name": self.name,
            "baseline": self.baseline_name,
            "n": len(self.ours_milliseconds),
            "median_ms": _rounded(statistics.median(self.ours_milliseconds)),
            "p95_ms": _rounded(percentile(self.ours_milliseconds, 95)),
            "baseline_median_ms": _rounded(statistics.median(self.baseline_milliseconds)),
            "baseline_p95_ms": _rounded(percentile(self.baseline_milliseconds, 95)),
            "ratio": round(self.ratio, 3),
            "limit": self.limit,
            "within": self.is_within,
            "samples_ms": [_rounded(value) for value in self.ours_milliseconds],
            "baseline_samples_ms": [_rounded(value) for value in self.baseline_milliseconds],
        }


def table(title: str, comparisons: Sequence[Comparison]) -> Table:
    """The comparisons as people read them."""
    shown = Table(title=title)
    for heading in ("measure", "n", "median", "p95", "ratio", "limit", "verdict"):
        shown.add_column(heading, justify="left" if heading in {"measure", "verdict"} else "right")
    for one in comparisons:
        shown.add_row(
            one.name,
            *_figures(one.ours_milliseconds),
            f"{one.ratio:.2f}",
            f"{one.limit:.2f}",
            "[green]within[/]" if one.is_within else "[bold red]over[/]",
        )
        shown.add_row(f"  {one.baseline_name}", *_figures(one.baseline_milliseconds), end_section=True, style="dim")
    return shown


def _figures(values: Sequence[float]) -> tuple[str, str, str]:
    return str(len(values)), f"{statistics.median(values):.1f} ms", f"{percentile(values, 95):.1f} ms"


def _rounded(value: float) -> float:
    return round(value, 2)
