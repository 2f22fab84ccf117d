"""Curves of several runs over each other, as SVG with HTML around it; `chart` draws those of one."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite

from danlu.report.chart import (
    WIDTH,
    ChartSeries,
    Point,
    Scale,
    downsample,
    finite_segments,
    horizontal_line,
    smooth,
    smoothing_window,
    svg_path,
    thin_piece,
    ticks,
    value_labels,
    value_scale,
    value_ticks,
)


@dataclass(frozen=True, kw_only=True)
class OverlayCurve:
    """The curve of one run."""

    css_class: str
    """Sets its color."""
    label: str
    points: Sequence[Point]
    """In order of their positions; a non-finite value leaves a gap."""
    marks: Sequence[tuple[float, str]] = ()
    """Positions of events to mark, each with what happened."""


@dataclass(frozen=True, kw_only=True)
class PositionAxis:
    """The horizontal axis of a chart."""

    unit: float
    """Unit in which its ticks are round numbers."""
    format_tick: Callable[[float], str]
    format_position: Callable[[float], str]
    """Formats any position, for the pointer."""


def render_overlay(
    scaled_as: ChartSeries, curves: Sequence[OverlayCurve], axis: PositionAxis, *, height: int, columns: int
) -> str:
    """A figure with the curves; title, formats and scale are those of `scaled_as`, which has the points of all."""
    every = [x for curve in curves for x, _ in curve.points]
    across = Scale(min(every), max(max(every), min(every) + 1e-9), WIDTH)
    up = value_scale(scaled_as, height)

    def to_pixels(point: Point) -> Point:
        return across(point[0]), height - up(point[1])

    rows = value_ticks(scaled_as, up)
    window = smoothing_window(max(len(curve.points) for curve in curves)) if scaled_as.smooth else 1
    drawing = [horizontal_line("grid", height - up(row)) for row in rows]
    answers: list[list[list[str]]] = []
    for curve in curves:
        pieces = [thin_piece(piece, across, columns) for piece in finite_segments(curve.points)]
        drawing += _marks(curve, across, height)
        drawing += _lines(curve, pieces, window, columns, to_pixels)
        answers.append(
            [[axis.format_position(x), scaled_as.format_value(value)] for piece in pieces for x, value in piece]
        )
    smoothed = f"smoothed over {window} steps" if window > 1 else ""
    notes = " · ".join(filter(None, [scaled_as.note, smoothed, "log scale" if up.log else ""]))
    data = json.dumps({"labels": [curve.label for curve in curves], "answers": answers}, ensure_ascii=False)
    return (
        f'<figure class="chart {scaled_as.name}"><figcaption><h3>{escape(scaled_as.title)}</h3>'
        f"{f'<small>{escape(notes)}</small>' if notes else ''}</figcaption>"
        f'<div class="plot" style="--height:{height}px">'
        f'<svg viewBox="0 0 {WIDTH} {height}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(_aria_label(scaled_as, curves))}">{"".join(drawing)}</svg>'
        f"{value_labels(scaled_as, rows, up, height)}{_position_labels(across, axis)}"
        '<i class="cross"></i><output class="tip"></output></div>'
        f'<script type="application/json" class="points">{data.replace("<", chr(92) + "u003c")}</script></figure>'
    )


def _lines(
    curve: OverlayCurve,
    pieces: Sequence[Sequence[Point]],
    window: int,
    columns: int,
    to_pixels: Callable[[Point], Point],
) -> list[str]:
    """One run's curve, faint under a smoothed one; the first path is what the pointer follows."""
    finite = [point for point in curve.points if isfinite(point[1])]
    is_smoothed = window > 1 and len(finite) > 1
    raw = "".join(svg_path(piece, to_pixels) for piece in pieces)
    if len(finite) == 1:
        raw += "h0"  # a line of zero length with round ends: a dot
    lines = [f'<path class="{curve.css_class} curve {"raw" if is_smoothed else "line"}" d="{raw}"/>']
    if is_smoothed:
        smoothed = svg_path(downsample(smooth(finite, window), columns // 2), to_pixels)
        lines.append(f'<path class="{curve.css_class} line" d="{smoothed}"/>')
    return lines


def _marks(curve: OverlayCurve, across: Scale, height: int) -> list[str]:
    """What happened to a run, as ticks in its color at the bottom of the chart."""
    return [
        f'<path class="{curve.css_class} happened" d="M{across(x):.1f} {height - 12}V{height}">'
        f"<title>{escape(text)}</title></path>"
        for x, text in curve.marks
    ]


def _position_labels(across: Scale, axis: PositionAxis) -> str:
    marks = [mark * axis.unit for mark in ticks(across.low / axis.unit, across.high / axis.unit, 6)]
    return "".join(
        f'<span class="step{" minor" if index % 2 else ""}" style="left:{across(mark) / WIDTH:.2%}">'
        f"{escape(axis.format_tick(mark))}</span>"
        for index, mark in enumerate(marks)
    )


def _aria_label(scaled_as: ChartSeries, curves: Sequence[OverlayCurve]) -> str:
    """The chart in a sentence, for screen readers."""
    ends = []
    for curve in curves:
        finite = [value for _, value in curve.points if isfinite(value)]
        text = f"from {scaled_as.format_value(finite[0])} to {scaled_as.format_value(finite[-1])}" if finite else "none"
        ends.append(f"{curve.label} {text}")
    return f"{scaled_as.title}: {', '.join(ends)}"
