"""Pauses between attempts, as values."""

from __future__ import annotations


def pause_after(attempt: int, first_seconds: float, last_seconds: float) -> float:
    """Return the pause after the n-th failed attempt in a row.

    Args:
        attempt: 1 after the first failure.
        first_seconds: Pause after the first failure.
        last_seconds: The longest pause.
    """
    return min(first_seconds * 2.0 ** min(attempt - 1, 32), last_seconds)
