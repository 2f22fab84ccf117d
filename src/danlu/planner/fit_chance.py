"""The chance that a plan fits its chips, from published runs whose memory was measured."""

from functools import cache
from math import ceil

from danlu.planner.residuals import memory_residuals

HELD_PERCENT = 95
"""Percentage of the published runs that would have fit with the memory that is kept free by default."""


@cache
def default_reserve() -> float:
    """Share of a chip's memory to keep free, so that `HELD_PERCENT` of the published runs would have fit."""
    ratios = sorted(row.ratio for row in memory_residuals())
    return 1 - 1 / max(1.0, ratios[ceil(len(ratios) * HELD_PERCENT / 100) - 1])


def fit_chance(predicted_bytes: float, chip_bytes: float) -> float:
    """The share of published runs that fit, had they been predicted to take this much of a chip.

    A published run that took 5 % more than predicted counts as fitting if 1.05 times these bytes do.
    """
    rows = memory_residuals()
    return sum(row.ratio * predicted_bytes <= chip_bytes for row in rows) / len(rows)
