"""`danlu plan --days`: the fewest whole nodes that meet a deadline."""

from typing import Any

import typer
from rich.text import Text

from danlu.cli.plan_modes import PlanContext
from danlu.cli.plan_progress import deadline_bar
from danlu.planner import PlanRequestError, search
from danlu.planner.deadline import DeadlineResult, fewest_chips, training_days
from danlu.planner.error_band import error_band
from danlu.planner.goodput import goodput
from danlu.report import plan_tables as tables
from danlu.report.formatting import count
from danlu.report.plan_confidence import band_text, tie_text
from danlu.report.precision_text import describe_question

_SCALE = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def show_deadline(context: PlanContext, days: float, tokens: str) -> None:
    """The fewest chips that meet a deadline."""
    request = context.request
    wanted = (
        _tokens(tokens)
        if tokens
        else float(request.recipe.batch.cursor_after(request.recipe.steps) * request.recipe.batch.length)
    )
    with deadline_bar() as report_progress:
        found = fewest_chips(request, wanted, days, search, context.mtbf, report_progress)
    value: dict[str, Any] = {"tokens": wanted, "days": days, "tried": dict(found.tried_chips), "best": None}
    value["ruled_out"] = found.ruled_out
    if found.result is None:
        words = f"{count(wanted)} tokens do not finish within {days:g} days on {request.chips:,} chips or fewer"
        context.show(Text(f"{describe_question(request)}\n{words}: {_fewer_words(found)}."), value)
        raise typer.Exit(1)
    chosen = found.result.answer
    expected = goodput(chosen.request, context.mtbf)
    taken = training_days(chosen, wanted, context.mtbf)
    low, high = error_band(chosen.request).seconds(taken)
    nodes = -(-chosen.request.chips // request.cluster.chips_per_node)
    words = (
        f"{count(wanted)} tokens in {days:g} days need {nodes:,} nodes, {chosen.request.chips:,} chips: finished in "
        f"{taken:.1f} days ({low:.1f} to {high:.1f} for 8 of 10 runs like it)"
        f"{', failures included' if expected else ''}. Fewer nodes do not: {_fewer_words(found)}."
    )
    value |= {"best": tables.plan_json(chosen, expected), "taken_days": taken, "taken_days_band": [low, high]}
    table = tables.side_by_side([("1", chosen)], expected)
    notes = (Text(tie_text(found.result)), Text(band_text(chosen)))
    context.show(tables.with_header(chosen, Text(words), Text(), table, Text(), *notes), value)


def _fewer_words(found: DeadlineResult) -> str:
    """How the other numbers of nodes were excluded."""
    searched = sum(days is None for _, days in found.tried_chips)
    bounded = f"{found.ruled_out:,} numbers are too slow, or have no layout, by lower bounds on their step"
    return f"{bounded}, and {searched:,} by a search" if searched else bounded


def _tokens(text: str) -> float:
    scale = _SCALE.get(text[-1:], 1.0)
    number = text[:-1] if text[-1:] in _SCALE else text
    try:
        return float(number) * scale
    except ValueError:
        raise PlanRequestError(f'--tokens: "{text}" must be a number such as 15T or 300B') from None
