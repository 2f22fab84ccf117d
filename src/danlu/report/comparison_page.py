"""One self-contained page with several runs over each other: figures, curves, settings that differ."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from math import nan
from typing import Any

from danlu.report import formatting
from danlu.report.chart import ChartSeries, Point, render_swatches
from danlu.report.comparison_tables import describe_losses, figure_rows, format_position, format_setting
from danlu.report.overlay_chart import OverlayCurve, PositionAxis, render_overlay
from danlu.report.page_template import LOGO, page_footer, render_document
from danlu.report.run_comparison import Axis, ComparedRun, RunComparison
from danlu.report.spikes import format_spike
from danlu.spec import StepEvent

_AXES: dict[Axis, str] = {"step": "steps", "tokens": "tokens", "hours": "running time"}
_TIME_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


@dataclass(frozen=True)
class _StepCurve:
    """A figure that every step has."""

    series: ChartSeries
    value: Callable[[StepEvent], float]


def comparison_page(comparison: RunComparison) -> str:
    """The page of a comparison; it loads nothing, and needs no script but for values under the pointer."""
    names = " · ".join(run.name for run in comparison.runs)
    body = [
        f'<header>{LOGO}<div class="title"><h1>{escape(names)}</h1></div></header>',
        _figures(comparison),
        _losses(comparison),
        _curves(comparison),
        _settings("Recipe", comparison, comparison.recipe),
        _settings("Plan", comparison, comparison.plan),
        _notes(comparison),
        page_footer(),
    ]
    return render_document(names, "".join(body), styles=("page.css", "comparison.css"), scripts=("comparison.js",))


def _figures(comparison: RunComparison) -> str:
    rows = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for name, values in figure_rows(comparison)
    )
    head = "".join(f"<th>{_swatch(comparison, run)}{escape(run.name)}</th>" for run in comparison.runs)
    return (
        f'<h2>Figures</h2><div class="card scroll"><table class="beside"><tr><th></th>{head}</tr>{rows}</table></div>'
    )


def _losses(comparison: RunComparison) -> str:
    items = "".join(f"<li>{escape(describe_losses(each, comparison))}</li>" for each in comparison.losses)
    return f'<h2>Losses</h2><div class="card"><ul class="warnings">{items}</ul></div>'


def _curves(comparison: RunComparison) -> str:
    """The charts over every axis, of which a choice without a script shows one."""
    if not any(run.history.steps for run in comparison.runs):
        return "<h2>Curves</h2><p>No run has taken a step yet.</p>"
    choices = "".join(
        f'<input type="radio" name="axis" id="by-{axis}"{" checked" if axis == "step" else ""}>'
        f'<label for="by-{axis}">{name}</label>'
        for axis, name in _AXES.items()
    )
    sections = "".join(
        f'<div class="charts by-{axis}">{"".join(_charts_over(comparison, axis))}</div>' for axis in _AXES
    )
    legend = render_swatches((_css_class(comparison, run), f"{run.label} {run.name}") for run in comparison.runs)
    return f'<h2>Curves</h2><div class="axes">{choices}<p class="runs soft">{legend}</p>{sections}</div>'


def _charts_over(comparison: RunComparison, axis: Axis) -> list[str]:
    """Loss, held-out loss, speed, gradient norm, learning rate."""
    charts = [_step_chart(comparison, axis, curve) for curve in _step_curves()]
    return [charts[0], _held_out_chart(comparison, axis), *charts[1:]]


def _step_curves() -> list[_StepCurve]:
    def series(name: str, title: str, format_value: Callable[[float], str], **more: Any) -> ChartSeries:
        return ChartSeries(name=name, title=title, points=(), format_value=format_value, **more)

    loss = series("loss", "Loss", formatting.loss, format_tick=formatting.number, smooth=True, log_ratio=3)
    speed = series("speed", "Tokens per second", formatting.count, smooth=True, axis_min=0)
    norm = series("norm", "Gradient norm", formatting.number, note="before clipping", smooth=True, log_ratio=20)
    rate = series("rate", "Learning rate", formatting.scientific, axis_min=0)
    return [
        _StepCurve(loss, lambda step: step.loss),
        _StepCurve(speed, lambda step: step.tokens / step.seconds if step.seconds > 0 else nan),
        _StepCurve(norm, lambda step: step.norm),
        _StepCurve(rate, lambda step: step.learning_rate),
    ]


def _step_chart(comparison: RunComparison, axis: Axis, curve: _StepCurve) -> str:
    points = [
        list(zip(run.positions(axis), map(curve.value, run.history.steps), strict=True)) for run in comparison.runs
    ]
    is_loss = curve.series.name == "loss"
    return _chart(
        comparison, axis, curve.series, points, height=300 if is_loss else 170, columns=600 if is_loss else 300
    )


def _held_out_chart(comparison: RunComparison, axis: Axis) -> str:
    """The mean over all held-out data; evaluations before the first step are left out of other axes than steps."""
    series = ChartSeries(
        name="heldout",
        title="Held-out loss",
        points=(),
        format_value=formatting.loss,
        format_tick=formatting.number,
        note="mean of all data sets, by their tokens",
        log_ratio=3,
    )
    points: list[list[Point]] = []
    for run in comparison.runs:
        places = dict(zip((step.step for step in run.history.steps), run.positions(axis), strict=True))
        points.append([(places[e.step], e.loss) for e in run.history.evaluations if e.step in places])
    return _chart(comparison, axis, series, points, height=170, columns=300) if any(points) else ""


def _chart(
    comparison: RunComparison,
    axis: Axis,
    series: ChartSeries,
    points: Sequence[Sequence[Point]],
    *,
    height: int,
    columns: int,
) -> str:
    curves = [
        OverlayCurve(css_class=_css_class(comparison, run), label=run.label, points=some, marks=_marks(run, axis))
        for run, some in zip(comparison.runs, points, strict=True)
    ]
    every = [point for some in points for point in some]
    ends = [x for run in comparison.runs for x in run.positions(axis)[-1:]]
    return render_overlay(replace(series, points=every), curves, _axis(axis, max(ends)), height=height, columns=columns)


def _marks(run: ComparedRun, axis: Axis) -> list[tuple[float, str]]:
    """Resumes and spikes, at the first step of the branch that was taken from there on."""
    happened = [(step, f"{run.label}: resumed from step {step:,}") for step in run.history.resume_steps]
    happened += [(spike.step, f"{run.label}: spike {format_spike(spike)}") for spike in run.history.spikes]
    places = dict(zip((step.step for step in run.history.steps), run.positions(axis), strict=True))
    return [(places[step], text) for step, text in happened if step in places]


def _axis(axis: Axis, end: float) -> PositionAxis:
    def at(value: float) -> str:
        return format_position(value, axis)

    if axis == "step":
        return PositionAxis(unit=1, format_tick=lambda value: f"{value:,.5g}", format_position=at)
    if axis == "tokens":
        return PositionAxis(unit=1, format_tick=formatting.count, format_position=at)
    unit, name = next((each for each in _TIME_UNITS if end >= 2 * each[0]), _TIME_UNITS[-1])
    return PositionAxis(unit=unit, format_tick=lambda value: f"{value / unit:g} {name}", format_position=at)


def _settings(title: str, comparison: RunComparison, differences: dict[str, list[Any]]) -> str:
    if not differences:
        return f'<h2>{title}</h2><div class="card">No key differs.</div>'
    head = "".join(f"<th>{_swatch(comparison, run)}{run.label}</th>" for run in comparison.runs)
    rows = "".join(
        f"<tr><td><code>{escape(key)}</code></td>"
        f"{''.join(f'<td>{escape(format_setting(value))}</td>' for value in values)}</tr>"
        for key, values in differences.items()
    )
    return (
        f'<h2>{title}</h2><div class="card scroll"><table class="beside"><tr><th>key that differs</th>{head}</tr>'
        f"{rows}</table></div>"
    )


def _notes(comparison: RunComparison) -> str:
    notes = [f"{run.label}: {note}" for run in comparison.runs for note in run.notes]
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<h2>Warnings</h2><div class="card"><ul class="warnings">{items}</ul></div>' if items else ""


def _css_class(comparison: RunComparison, run: ComparedRun) -> str:
    return f"run{comparison.runs.index(run)}"


def _swatch(comparison: RunComparison, run: ComparedRun) -> str:
    return f'<i class="swatch {_css_class(comparison, run)}"></i>'
