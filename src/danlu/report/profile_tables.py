"""A profile as a table and as JSON: predicted against measured, part by part."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from danlu.cost import StepPrediction
from danlu.profiler.comparison import (
    ComparedPart,
    compare_parts,
    compare_total,
    largest_gap,
    profiler_slowdown,
)
from danlu.report.formatting import MISSING, percent
from danlu.spec.profile import RankProfile


def parts_table(profiles: Sequence[RankProfile], prediction: StepPrediction | None) -> Table:
    """The parts of a step, the worst predicted first; without a prediction the longest first."""
    total = compare_total(profiles, prediction)
    title = "Milliseconds of a step, by part"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("part")
    for heading in ("predicted", "measured", "from – to", "ratio", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in compare_parts(profiles, prediction):
        table.add_row(*_cells(row, total.measured))
    table.add_row(*_cells(total, total.measured), style="bold")
    return table


def summary_lines(profiles: Sequence[RankProfile]) -> list[str]:
    """How far the figures can be trusted."""
    gap, slowdown = largest_gap(profiles), profiler_slowdown(profiles)
    return [
        f"parts add up to the step within {gap:.2%}, of {len(profiles[0].steps)} steps on {len(profiles)} ranks",
        f"profiled steps took {slowdown:+.0%} against those before them without the profiler",
    ]


def profile_json(profiles: Sequence[RankProfile], prediction: StepPrediction | None) -> dict[str, Any]:
    """Everything but the timeline."""
    return {
        "parts": [_figures(row) for row in compare_parts(profiles, prediction)],
        "step": _figures(compare_total(profiles, prediction)),
        "largest_gap": largest_gap(profiles),
        "profiler_slowdown": profiler_slowdown(profiles),
        "assumptions": list(prediction.assumptions) if prediction else [],
        "ranks": [profile.model_dump(exclude={"timeline"}) for profile in profiles],
    }


def _figures(row: ComparedPart) -> dict[str, Any]:
    return {
        "part": row.part,
        "label": row.label,
        "predicted": row.predicted,
        "measured": row.measured,
        "lowest": row.lowest,
        "highest": row.highest,
        "ratio": row.ratio,
    }


def _cells(row: ComparedPart, step: float) -> list[str]:
    return [
        row.label,
        MISSING if row.predicted is None else f"{1e3 * row.predicted:.1f}",
        f"{1e3 * row.measured:.1f}",
        f"{1e3 * row.lowest:.1f} – {1e3 * row.highest:.1f}",
        MISSING if row.ratio is None else f"{row.ratio:.2f}",
        percent(row.measured / step),
    ]
