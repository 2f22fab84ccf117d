"""Layouts held against their dry runs, in tables and in JSON."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from danlu.planner.goodput import Goodput
from danlu.planner.verify import Line, Verified
from danlu.report.plan_tables import choice_json, degrees_text, schedule_text, step_text
from danlu.report.wording import MISSING, duration


def verified_view(found: Sequence[Verified], chosen: Verified | None) -> RenderableType:
    """Every layout with formula beside program, its verdict, and which one is proposed."""
    parts: list[RenderableType] = []
    for number, each in enumerate(found, start=1):
        parts += [_table(number, each), Text(f"{number} {each.verdict}", style="red" if each.is_refused else "")]
        parts += [*(Text(note) for note in each.notes), Text()]
    if chosen is None:
        words = f"None of the {len(found)} best stands: verify more of them, or keep more memory free (--reserve)."
    else:
        place = found.index(chosen) + 1
        passed = f", because the {place - 1} before it are refused" if place > 1 else ""
        words = f"Proposed: {place}, {degrees_text(chosen.choice)}{passed}."
    return Group(*parts, Text(words, style="bold"))


def _table(number: int, each: Verified) -> Table:
    choice = each.choice
    schedule = schedule_text(choice)
    title = (
        f"{number}: {degrees_text(choice)}{'' if schedule == MISSING else f', {schedule}'}, microbatch "
        f"{choice.microbatch} × {choice.candidate.core.microbatches}, recompute {choice.candidate.work.recompute}: "
        f"{step_text(choice.seconds)} a step (dry run of {_ranks(len(each.places))}: {duration(each.seconds)})"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(f"rank {each.rank:,}, place {each.place}" if len(each.places) > 1 else "rank 0", no_wrap=True)
    for name in ("formula", "program", "formula/program"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in (*each.places, *each.lines):
        ratio = MISSING if line.ratio is None else f"{line.ratio:.2f}"
        table.add_row(line.figure, _shown(line, line.formula), _shown(line, line.program), ratio, style=_style(line))
    return table


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _style(line: Line) -> str:
    return "yellow" if line.is_wrong else ""


def _shown(line: Line, value: float) -> str:
    if line.unit == "FLOPs":
        return f"{value / 1e12:,.0f} TFLOPs" if value >= 1e14 else f"{value / 1e12:.3g} TFLOPs"
    return f"{value / 1e9:,.3f} GB"


def verified_json(found: Sequence[Verified], chosen: Verified | None, kept: Goodput | None) -> dict[str, Any]:
    """The same for machines."""
    return {
        "proposed": found.index(chosen) if chosen else None,
        "verified": [
            choice_json(each.choice, kept)
            | {
                "refused": each.is_refused,
                "verdict": each.verdict,
                "rank": each.rank,
                "place": each.place,
                "device_bytes": each.device,
                "dryrun_seconds": each.seconds,
                "notes": list(each.notes),
                "figures": [_line_json(line) for line in (*each.places, *each.lines)],
            }
            for each in found
        ],
    }


def _line_json(line: Line) -> dict[str, Any]:
    return {
        "figure": line.figure,
        "unit": line.unit,
        "formula": line.formula,
        "program": line.program,
        "ratio": line.ratio,
        "wrong": line.is_wrong,
    }
