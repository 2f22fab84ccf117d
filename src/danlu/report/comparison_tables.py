"""Runs beside each other, for the terminal: figures, losses, settings that differ."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from danlu.report import formatting
from danlu.report.chart import smoothing_window
from danlu.report.checkpoints import format_short_duration
from danlu.report.run_comparison import Axis, ComparedRun, LossDifference, RunComparison, loss_at
from danlu.report.terminal_chart import TerminalCurve, draw_curves
from danlu.spec.problem import format_value

CHART_HEIGHT = 16
MAX_CHART_WIDTH = 120
_COLUMN = 24
"""Width that a run's column needs, roughly."""
_STYLES = ("dark_orange", "cyan", "magenta", "blue", "green", "red", "yellow", "white")


def comparison_view(comparison: RunComparison, *, width: int, colored: bool, axis: Axis = "step") -> RenderableType:
    """Everything about some runs, in at most `width` characters."""
    at_once = max(1, (width - 20) // _COLUMN)
    parts: list[RenderableType] = []
    for runs in _batches(comparison.runs, at_once):
        parts += [_figures(comparison, runs, colored), Text()]
    parts += _chart(comparison, min(width, MAX_CHART_WIDTH), colored, axis)
    parts += [Text(describe_losses(each, comparison)) for each in comparison.losses]
    for title, differences in (("recipe", comparison.recipe), ("plan", comparison.plan)):
        parts += [Text(), *_settings(title, comparison, differences, at_once)]
    parts += [Text(f"{run.label}: {note}", "yellow") for run in comparison.runs for note in run.notes]
    return Group(*parts)


def figure_rows(comparison: RunComparison) -> list[tuple[str, list[str]]]:
    """Every figure with its value for each run; figures that no run has are omitted."""
    runs, common, evaluated = comparison.runs, comparison.last_common_step, comparison.evaluated_step
    figures: list[tuple[str, Callable[[ComparedRun], str]]] = [
        ("state", lambda run: run.summary.state),
        ("model", lambda run: run.summary.model or formatting.MISSING),
        ("steps", _format_steps),
        ("last loss", lambda run: formatting.loss(run.summary.loss)),
    ]
    if common is not None:
        figures.append((f"loss at step {common:,}", lambda run: formatting.loss(loss_at(run, common))))
    figures += [
        (_held_out_title(name, evaluated), lambda run, name=name: _format_held_out(run, name, evaluated))  # type: ignore[misc]
        for name in _data_sets(comparison)
    ]
    figures += [
        ("tokens", lambda run: formatting.count(run.summary.tokens)),
        ("tokens/s", lambda run: formatting.count(run.summary.tokens_per_second)),
        ("median step", _format_step_time),
        ("MFU", lambda run: formatting.percent(run.summary.mfu)),
        ("memory", lambda run: formatting.size(run.summary.memory)),
        ("time", lambda run: formatting.duration(run.summary.seconds) if run.history.starts else formatting.MISSING),
        ("goodput", lambda run: formatting.percent(run.history.goodput)),
        ("precision", lambda run: run.summary.precision or formatting.MISSING),
        ("layout", lambda run: run.layout or formatting.MISSING),
        ("chip", lambda run: run.summary.chip or formatting.MISSING),
        ("interruptions", _format_interruptions),
    ]
    rows = [(name, [show(run) for run in runs]) for name, show in figures]
    return [row for row in rows if set(row[1]) != {formatting.MISSING}]


def describe_losses(difference: LossDifference, comparison: RunComparison) -> str:
    """In a sentence, how far the losses of two runs are equal, and how far apart they are after that."""
    names = {run.label: f"{run.label} ({run.name})" for run in comparison.runs}
    pair = f"{names[difference.first]} and {names[difference.second]}"
    if not difference.common_steps:
        return f"{pair} have no step in common"
    if difference.differs_at is None:
        steps = f"{difference.common_steps:,} common step{'s' * (difference.common_steps != 1)}"
        return f"{pair}: all losses of the {steps} are equal to the last bit"
    assert difference.losses is not None
    equal = (
        "differ from the first common step on"
        if difference.equal_until is None
        else f"are equal to the last bit up to step {difference.equal_until:,}"
    )
    one, other = (f"{loss:.9g}" for loss in difference.losses)
    text = f"{pair}: losses {equal}; step {difference.differs_at:,} has {one} and {other}"
    if difference.largest is not None and difference.largest_at is not None:
        text += f"; at most {difference.largest:.1e} apart, relative, at step {difference.largest_at:,}"
    return text


def format_setting(value: Any) -> str:
    """A value of a recipe or a plan; a key that a run does not have is a dash."""
    return formatting.MISSING if value is None else format_value(value)


def _figures(comparison: RunComparison, runs: Sequence[ComparedRun], colored: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for run in runs:
        table.add_column(_header(comparison, run, colored), overflow="fold")
    places = [comparison.runs.index(run) for run in runs]
    for name, values in figure_rows(comparison):
        table.add_row(f"[dim]{escape(name)}[/]", *(escape(values[place]) for place in places))
    return table


def _header(comparison: RunComparison, run: ComparedRun, colored: bool) -> Text:
    mark = f"{run.label} ━━ " if colored else f"{run.label}  "
    return Text.assemble((mark, _STYLES[comparison.runs.index(run)]), run.name)


def _chart(comparison: RunComparison, width: int, colored: bool, axis: Axis) -> list[RenderableType]:
    curves = [
        TerminalCurve(
            letter=run.label,
            style=_STYLES[at],
            points=list(zip(run.positions(axis), (step.loss for step in run.history.steps), strict=True)),
        )
        for at, run in enumerate(comparison.runs)
    ]
    drawing = draw_curves(
        curves,
        width=width,
        height=CHART_HEIGHT,
        colored=colored,
        format_value=formatting.number,
        format_position=lambda value: format_position(value, axis),
        log_ratio=3,
    )
    if not drawing:
        return [Text("No run has taken a step yet.")]
    window = smoothing_window(max(len(curve.points) for curve in curves))
    smoothed = f", smoothed over {window:,} steps" if window > 1 else ""
    over = {"step": "steps", "tokens": "tokens", "hours": "running time"}[axis]
    several = "" if colored else "; * several runs"
    return [Text(f"loss over {over}{smoothed}{several}", "bold"), drawing, Text()]


def format_position(value: float, axis: Axis) -> str:
    """A position on an axis: `step 1,200`, `1.2M tokens`, `3 h 12 min`."""
    if axis == "step":
        return f"step {value:,.0f}"
    return f"{formatting.count(value)} tokens" if axis == "tokens" else formatting.duration(value)


def _settings(
    title: str, comparison: RunComparison, differences: dict[str, list[Any]], at_once: int
) -> list[RenderableType]:
    """The keys that differ; a line if none does."""
    if not differences:
        return [Text(f"{title}: no key differs")]
    tables: list[RenderableType] = []
    for runs in _batches(comparison.runs, at_once):
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in (title, *(run.label for run in runs)):
            table.add_column(name, overflow="fold")
        for key, values in differences.items():
            table.add_row(escape(key), *(escape(format_setting(values[comparison.runs.index(run)])) for run in runs))
        tables.append(table)
    return tables


def _batches(runs: Sequence[ComparedRun], size: int) -> list[tuple[ComparedRun, ...]]:
    return [tuple(runs[at : at + size]) for at in range(0, len(runs), size)]


def _format_steps(run: ComparedRun) -> str:
    done = f"{run.summary.step:,}"
    return done if run.summary.steps is None else f"{done} of {run.summary.steps:,}"


def _format_step_time(run: ComparedRun) -> str:
    seconds = run.history.stats_of(run.history.start_of_last_step).step_seconds
    return formatting.MISSING if seconds is None else format_short_duration(seconds)


def _format_interruptions(run: ComparedRun) -> str:
    history = run.history
    counts = [
        (len(history.starts) - 1, "resumed"),
        (len(history.rewinds), "rewound"),
        (len(history.skipped_steps), "skipped"),
    ]
    return ", ".join(f"{count:,} × {what}" for count, what in counts if count > 0) or formatting.MISSING


def _data_sets(comparison: RunComparison) -> list[str]:
    """The held-out data sets of any run."""
    every = (event for run in comparison.runs for event in run.history.evaluations)
    return list(dict.fromkeys(name for event in every for name in event.losses))


def _held_out_title(name: str, step: int | None) -> str:
    return f"held out, {name}" if step is None else f"held out at {step:,}, {name}"


def _format_held_out(run: ComparedRun, name: str, step: int | None) -> str:
    """The loss after the common step; without one the newest, with its step."""
    event = run.evaluation_at(step)
    if event is None or name not in event.losses:
        return formatting.MISSING
    return f"{formatting.loss(event.losses[name])}{'' if step is not None else f' at step {event.step:,}'}"
