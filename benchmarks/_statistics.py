"""Medians, percentiles, and the verdicts on ratios and bounds."""

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
    """One measure of ours beside its baseline, both taken in this run."""

    name: str
    baseline_name: str
    ours: tuple[float, ...]
    baseline: tuple[float, ...]
    limit: float | None
    """Highest ratio of the medians that is accepted; None where it is only shown."""
    limit_p95: float | None = None
    """Highest ratio of the 95th percentiles that is accepted; None where they are only shown."""
    unit: str = "ms"

    @property
    def ratio(self) -> float:
        """Our median over the baseline's."""
        return statistics.median(self.ours) / statistics.median(self.baseline)

    @property
    def ratio_p95(self) -> float:
        """Our 95th percentile over the baseline's."""
        return percentile(self.ours, 95) / percentile(self.baseline, 95)

    @property
    def is_within(self) -> bool:
        """Whether every limit is kept."""
        return all(
            limit is None or ratio <= limit
            for ratio, limit in ((self.ratio, self.limit), (self.ratio_p95, self.limit_p95))
        )

    def to_json(self) -> dict[str, object]:
        """Everything about it, for a program."""
        return {
            "name": self.name,
            "baseline": self.baseline_name,
            "unit": self.unit,
            "n": len(self.ours),
            "median": _rounded(statistics.median(self.ours)),
            "p95": _rounded(percentile(self.ours, 95)),
            "baseline_median": _rounded(statistics.median(self.baseline)),
            "baseline_p95": _rounded(percentile(self.baseline, 95)),
            "ratio": round(self.ratio, 3),
            "limit": self.limit,
            "ratio_p95": round(self.ratio_p95, 3),
            "limit_p95": self.limit_p95,
            "within": self.is_within,
            "samples": [_rounded(value) for value in self.ours],
            "baseline_samples": [_rounded(value) for value in self.baseline],
        }

    def rows(self) -> list[tuple[str, ...]]:
        """What the table shows of it: ours, then the baseline."""
        ours, baseline = (self._figures(values) for values in (self.ours, self.baseline))
        ratio, limit = f"{self.ratio:.2f}", "" if self.limit is None else f"{self.limit:.2f}"
        p95 = ("", "") if self.limit_p95 is None else (f"p95 {self.ratio_p95:.2f}", f"{self.limit_p95:.2f}")
        return [(self.name, *ours, ratio, limit), (f"  {self.baseline_name}", *baseline, *p95)]

    def _figures(self, values: Sequence[float]) -> tuple[str, str, str]:
        shown = (f"{value:.1f} {self.unit}" for value in (statistics.median(values), percentile(values, 95)))
        return str(len(values)), *shown  # type: ignore[return-value]  # exactly two


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """One figure that may not exceed a limit of its own."""

    name: str
    value: float
    limit: float
    unit: str

    @property
    def is_within(self) -> bool:
        """Whether the limit is kept."""
        return self.value <= self.limit

    def to_json(self) -> dict[str, object]:
        """Everything about it, for a program."""
        return {
            "name": self.name,
            "unit": self.unit,
            "value": _rounded(self.value),
            "limit": self.limit,
            "within": self.is_within,
        }

    def rows(self) -> list[tuple[str, ...]]:
        """What the table shows of it."""
        return [(self.name, "1", f"{self.value:.1f} {self.unit}", "", "", f"{self.limit:g} {self.unit}")]


Measure = Comparison | Bound


def table(title: str, measures: Sequence[Measure]) -> Table:
    """The measures as people read them."""
    shown = Table(title=title)
    for heading in ("measure", "n", "median", "p95", "ratio", "limit", "verdict"):
        shown.add_column(heading, justify="left" if heading in {"measure", "verdict"} else "right")
    for one in measures:
        verdict = _verdict(one)
        first, *others = one.rows()
        shown.add_row(*first, verdict, end_section=not others)
        for row in others:
            shown.add_row(*row, end_section=True, style="dim")
    return shown


def _verdict(one: Measure) -> str:
    if one.limit is None:
        return ""
    return "[green]within[/]" if one.is_within else "[bold red]over[/]"


def _rounded(value: float) -> float:
    return round(value, 2)
