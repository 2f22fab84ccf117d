"""Losses on held-out data as text, in tables and on the page."""

from math import exp, inf, isfinite

from danlu.report import formatting
from danlu.report.chart import ChartSeries
from danlu.report.page_template import figures_table
from danlu.report.run_history import RunHistory
from danlu.spec import EvaluationEvent

MAX_CHARTS = 8
"""Data sets with a chart each; of more only the mean over their tokens is drawn, and the table has them all."""


def perplexity(loss: float) -> float:
    """How many equally likely tokens the model hesitates between."""
    return exp(loss) if loss < 700 else inf


def format_evaluation(event: EvaluationEvent) -> str:
    """The newest evaluation, short enough for the progress line."""
    return f"held out {formatting.loss(event.loss)} at {event.step:,}"


def describe_evaluation(event: EvaluationEvent) -> str:
    """An evaluation with every data set, for the summary of a run."""
    text = f"{formatting.loss(event.loss)} at step {event.step:,}, perplexity {_format_perplexity(event.loss)}"
    if len(event.losses) > 1:
        text += ": " + ", ".join(f"{name} {formatting.loss(loss)}" for name, loss in event.losses.items())
    return text


def evaluation_series(history: RunHistory) -> list[ChartSeries]:
    """A chart of every data set, or of their mean if there are many."""
    events = history.evaluations
    names = list(dict.fromkeys(name for event in events for name in event.losses))
    if not names:
        return []
    if len(names) > MAX_CHARTS:
        return [_series("Held-out loss", f"mean of {len(names)} data sets", [(e.step, e.loss) for e in events])]
    return [
        _series("Held-out loss", name, [(e.step, e.losses[name]) for e in events if name in e.losses]) for name in names
    ]


def _series(title: str, note: str, points: list[tuple[float, float]]) -> ChartSeries:
    return ChartSeries(
        name="heldout",
        title=title,
        points=points,
        format_value=formatting.loss,
        format_tick=formatting.number,
        note=note,
        log_ratio=3,
    )


def evaluations_card(history: RunHistory) -> str:
    """The page's table of the newest evaluation, with the best of every data set."""
    if not history.evaluations:
        return ""
    newest = history.evaluations[-1]
    rows = []
    for name, loss in newest.losses.items():
        every = [(e.losses[name], e.step) for e in history.evaluations if name in e.losses]
        best = min((each for each in every if isfinite(each[0])), default=None)
        lowest = f"{formatting.loss(best[0])} at step {best[1]:,}" if best else formatting.MISSING
        rows.append((name, f"{newest.tokens[name]:,}", formatting.loss(loss), _format_perplexity(loss), lowest))
    names = ("data set", "tokens", f"loss at step {newest.step:,}", "perplexity", "lowest loss")
    return f"<h2>Held-out data</h2>{figures_table(names, rows)}"


def _format_perplexity(loss: float) -> str:
    return formatting.number(perplexity(loss)) if isfinite(loss) else formatting.MISSING
