"""How far to trust a plan's prediction, in words: error band, tie, chance to fit."""

from math import ceil
from typing import Any

from danlu.planner.error_band import ErrorBand, error_band
from danlu.planner.pricing import PricedPlan
from danlu.planner.request import PlanRequest
from danlu.planner.residuals import memory_residuals
from danlu.planner.search import SearchResult
from danlu.report.formatting import percent

MAX_ROWS = 10
"""Layouts that a table shows; JSON has all."""
MAX_VERIFY = 10
"""Largest number that `danlu plan --verify` takes."""


def shown_plans(result: SearchResult) -> tuple[PricedPlan, ...]:
    """The layouts that a table shows: the answer, the others of its tie, and then slower ones."""
    return result.ranked[:MAX_ROWS]


def row_labels(result: SearchResult) -> list[str]:
    """A number for every row, with `=` where it ties with the fastest and others do, too."""
    tied = len(result.tied) if len(result.tied) > 1 else 0
    return [f"{number}=" if number <= tied else f"{number}" for number in range(1, len(shown_plans(result)) + 1)]


def step_text(seconds: float) -> str:
    """Time of a step."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def step_with_band(priced: PricedPlan) -> str:
    """`62.34 s (55.1 to 70.2 s for 8 of 10 runs like it)`."""
    return f"{step_text(priced.seconds)} ({band_words(priced, error_band(priced.request))})"


def band_words(priced: PricedPlan, band: ErrorBand) -> str:
    """`55.1 to 70.2 s for 8 of 10 runs like it`."""
    scale, unit = (1.0, "s") if priced.seconds >= 1 else (1e3, "ms")
    low, high = (f"{scale * seconds:,.{_decimals(scale * seconds)}f}" for seconds in band.seconds(priced.seconds))
    runs = "runs like it" if band.is_near else "runs"
    return f"{low} to {high} {unit} for 8 of 10 {runs}"


def band_text(priced: PricedPlan) -> str:
    """The step time with its band, and the runs that the band is of."""
    band = error_band(priced.request)
    side = ""
    if band.is_near and not band.low <= 1 <= band.high:
        side = f"; most of them were {'faster' if band.high < 1 else 'slower'} than predicted"
    return f"Step: {step_with_band(priced)}: {band.source}{side}."


def tie_text(result: SearchResult) -> str:
    """Which layouts tie, which of them is the answer, and what would tell them apart."""
    width, fastest = width_text(result.tie_width), result.best[0].seconds
    if len(result.tied) == 1:
        return f"No other layout is within {width} of it."
    behind = result.answer.seconds / fastest - 1
    speed = "which is also the fastest" if behind <= 0 else f"{percent(behind)} slower than the fastest by prediction"
    more = len(result.tied) - MAX_ROWS
    hidden = f" ({more} more: --json)" if more > 0 else ""
    return (
        f"Within {width}: a tie of {len(result.tied)} layouts (marked =){hidden}, too close for the model to call. The "
        f"answer is the simplest (fewest parallel axes, then most free memory), {speed}. To tell them apart: "
        f"{', or '.join(ways_to_tell_apart(result.request, len(result.tied)))}."
    )


def width_text(width: float) -> str:
    """The width of a tie: `3 %`."""
    return f"{100 * width:g} %"


def ways_to_tell_apart(request: PlanRequest, layouts: int) -> list[str]:
    """What would show which of several tied layouts is best."""
    chips = f"--chips {request.chips} " if request.chips < request.cluster.chips else ""
    verify = f"`danlu plan {chips}--verify {min(layouts, MAX_VERIFY)}` (dry runs of them)"
    if request.cluster.chip.operators:  # this machine has been measured already
        return [verify, "a few steps of each with `danlu train`"]
    return [verify, "a plan for the file that `danlu probe` writes on the machine"]


def fit_chance_text(chance: float) -> str:
    """A chance to fit; never certain, because it comes from few runs."""
    least = ceil(100 / (len(memory_residuals()) + 1))
    if chance >= 1:
        return f">{100 - least} %"
    return f"<{least} %" if chance <= 0 else f"{min(max(round(100 * chance), least), 100 - least)} %"


def fit_text(priced: PricedPlan) -> str:
    """The chance to fit in one sentence."""
    return (
        f"Chance to fit: {fit_chance_text(priced.fit_chance)}, by how far {len(memory_residuals())} published runs "
        "were from their predicted memory."
    )


def band_json(priced: PricedPlan) -> dict[str, Any]:
    """The band of a step time as JSON."""
    band = error_band(priced.request)
    low, high = band.seconds(priced.seconds)
    return {"low": low, "high": high, "share": 0.8, "runs": band.runs, "near": band.is_near, "source": band.source}


def tie_json(result: SearchResult) -> dict[str, Any]:
    """The tie as JSON; its layouts are the first of `best`."""
    return {
        "width": result.tie_width,
        "layouts": len(result.tied),
        "fastest_seconds": result.best[0].seconds,
        "tell_apart": ways_to_tell_apart(result.request, len(result.tied)) if len(result.tied) > 1 else [],
    }


def _decimals(value: float) -> int:
    """So many that a value has three significant digits."""
    return 0 if value >= 100 else 1 if value >= 10 else 2
