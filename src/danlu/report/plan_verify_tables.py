"""Layouts compared with their dry runs, as tables and as JSON."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from danlu.planner.goodput import Goodput
from danlu.planner.verify import FigureComparison, LayoutVerification
from danlu.report.formatting import MISSING, duration
from danlu.report.plan_confidence import step_text
from danlu.report.plan_tables import degrees_text, plan_json, schedule_text
from danlu.report.precision_text import describe_question


def verification_view(found: Sequence[LayoutVerification], chosen: LayoutVerification | None) -> RenderableType:
    """Every layout with prediction and dry run, its verdict, and which one is proposed."""
    parts: list[RenderableType] = [Text(describe_question(found[0].priced_plan.request)), Text()]
    for number, each in enumerate(found, start=1):
        parts += [_table(number, each), Text(f"{number} {each.verdict}", style="red" if each.is_refused else "")]
        parts += [*(Text(note) for note in each.notes), Text()]
    if chosen is None:
        words = f"All {len(found)} were rejected: verify more of them, or keep more memory free (--reserve)."
    else:
        number = found.index(chosen) + 1
        passed = f", because the {number - 1} before it are rejected" if number > 1 else ""
        words = f"Proposed: {number}, {degrees_text(chosen.priced_plan)}{passed}."
    return Group(*parts, Text(words, style="bold"))


def _table(number: int, each: LayoutVerification) -> Table:
    priced = each.priced_plan
    schedule, run = schedule_text(priced), len(each.pp_rank_peaks)
    title = (
        f"{number}: {degrees_text(priced)}{'' if schedule == MISSING else f', {schedule}'}, microbatch "
        f"{priced.microbatch_size} × {priced.candidate.shape.microbatches}, "
        f"recompute {priced.candidate.schedule.recompute}: "
        f"{step_text(priced.seconds)} per step (dry run of {run} rank{'s' * (run != 1)}: {duration(each.seconds)})"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(f"rank {each.rank:,}, pp rank {each.pp_rank}" if run > 1 else "rank 0", no_wrap=True)
    for name in ("predicted", "dry run", "predicted/dry run"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in (*each.pp_rank_peaks, *each.figures):
        ratio = MISSING if line.ratio is None else f"{line.ratio:.2f}"
        style = "yellow" if line.is_wrong else ""
        table.add_row(line.figure, _shown(line, line.predicted), _shown(line, line.dry_run), ratio, style=style)
    return table


def _shown(line: FigureComparison, value: float) -> str:
    if line.unit == "FLOPs":
        return f"{value / 1e12:,.0f} TFLOPs" if value >= 1e14 else f"{value / 1e12:.3g} TFLOPs"
    return f"{value / 1e9:,.3f} GB"


def verification_json(
    found: Sequence[LayoutVerification], chosen: LayoutVerification | None, goodput: Goodput | None
) -> dict[str, Any]:
    """The same as JSON."""
    return {
        "proposed": found.index(chosen) if chosen else None,
        "verified": [
            plan_json(each.priced_plan, goodput)
            | {
                "refused": each.is_refused,
                "verdict": each.verdict,
                "rank": each.rank,
                "place": each.pp_rank,
                "device_bytes": each.device_bytes,
                "dryrun_seconds": each.seconds,
                "notes": list(each.notes),
                "figures": [_line_json(line) for line in (*each.pp_rank_peaks, *each.figures)],
            }
            for each in found
        ],
    }


def _line_json(line: FigureComparison) -> dict[str, Any]:
    return {
        "figure": line.figure,
        "unit": line.unit,
        "formula": line.predicted,
        "program": line.dry_run,
        "ratio": line.ratio,
        "wrong": line.is_wrong,
    }
