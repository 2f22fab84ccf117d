"""Curves over steps as inline SVG: small at any number of steps, sharp at any width, readable without a script.

The drawing stretches with the page (its strokes do not), so text is separate HTML, positioned in percent: one chart
works on a wide screen, a phone and paper.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from math import ceil, floor, isfinite, log10

WIDTH = 1000
"""Width of every drawing, in its own units; the page stretches it."""
MAX_DOTS = 60
"""Up to so many points are also drawn as dots, each with its own title."""

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class ChartSeries:
    """One quantity over the steps of a run."""

    name: str
    """Name for the page's style and script."""
    title: str
    points: Sequence[Point]
    """Step and value, in order; a non-finite value leaves a gap."""
    format_value: Callable[[float], str]
    """Formats a value."""
    format_tick: Callable[[float], str] | None = None
    """Formats a round value on the axis, where that is shorter."""
    tick_unit: float = 1.0
    """Unit in which axis ticks are round numbers: 10⁹ for bytes shown in GB."""
    note: str = ""
    smooth: bool = False
    axis_min: float | None = None
    """Start of the scale, unless a value is below."""
    log_ratio: float | None = None
    """Ratio of the highest to the lowest value from which the scale is logarithmic; never if None."""
    reference: tuple[float, str] | None = None
    """A level to compare with, and its name."""


@dataclass(frozen=True, kw_only=True)
class ChartMarkers:
    """Steps that every chart marks."""

    saved: Sequence[int] = ()
    resumed: Sequence[int] = ()
    skipped: Sequence[int] = ()
    spikes: Sequence[tuple[int, str]] = ()
    """Steps of spikes, and what happened at each."""


@dataclass(frozen=True)
class Scale:
    """Maps values to positions between 0 and `length`."""

    low: float
    high: float
    length: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The position of a value."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = log10(low), log10(high), log10(value)
        return (value - low) / (high - low) * self.length


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round values (1, 2 or 5 times a power of ten apart) that cover `low` to `high`, roughly `about` of them."""
    if high <= low:
        return [low]
    raw = (high - low) / max(about, 1)
    power = 10.0 ** floor(log10(raw))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= raw * 0.999)
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def byte_unit(most: float) -> float:
    """The largest of B, kB, MB, … that fits at least twice into a number of bytes: the unit of its axis."""
    unit = 1.0
    while most >= 2 * 1000 * unit:
        unit *= 1000
    return unit


def log_ticks(low: float, high: float) -> list[float]:
    """Round values within `low` to `high` for a logarithmic scale: powers of ten, with more in between if needed."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    values: list[float] = []
    for times in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        all_values = (float(f"{many * 10.0**power:.12g}") for power in powers for many in times)
        values = [value for value in all_values if low <= value <= high]
        if len(values) >= 4:
            break
    return values[:: ceil(len(values) / 7)] if values else ticks(low, high, 4)


def downsample(points: Sequence[Point], columns: int) -> list[Point]:
    """At most two points per pixel column, its lowest and its highest, and always the first and last of all.

    A spike of a single step among thousands stays visible, which a mean or every n-th point would lose.
    """
    if len(points) <= 2 * columns:
        return list(points)
    first, span = points[0][0], points[-1][0] - points[0][0]
    inner: dict[int, list[Point]] = {}
    for point in points[1:-1]:
        column = min(int((point[0] - first) / span * columns), columns - 1)
        inner.setdefault(column, []).append(point)
    kept = [points[0]]
    for group in inner.values():
        low, high = min(group, key=lambda point: point[1]), max(group, key=lambda point: point[1])
        kept += [low] if low == high else sorted((low, high))
    return [*kept, points[-1]]


def smooth(points: Sequence[Point], window: int | None = None) -> list[Point]:
    """A centered mean, applied twice so that a spike becomes a hill and not a box; it does not lag behind the curve.

    It is over `window` points, by default over as many as fit the curve's length.
    """
    values = [value for _, value in points]
    for _ in range(2):
        values = _centered_mean(values, (window or smoothing_window(len(points))) // 2)
    return [(step, value) for (step, _), value in zip(points, values, strict=True)]


def _centered_mean(values: Sequence[float], half: int) -> list[float]:
    """The mean of `half` values on either side.

    At the beginning, where curves are steep, the window narrows on both sides; at the end it keeps
    the earlier values, so that the last noisy step does not bend the curve.
    """
    sums = [0.0, *accumulate(values)]
    result = []
    for index in range(len(values)):
        first, past = index - min(half, index), index + min(half, index, len(values) - 1 - index) + 1
        result.append((sums[past] - sums[first]) / (past - first))
    return result


def smoothing_window(count: int) -> int:
    """Steps over which a curve of `count` points is averaged: about a fiftieth, odd; 1 for short runs."""
    return 1 if count < 100 else count // 100 * 2 + 3


def value_scale(curve: ChartSeries, height: float) -> Scale:
    """From the lowest value to the highest with a small margin."""
    values = [value for _, value in curve.points if isfinite(value)]
    if curve.reference:
        values.append(curve.reference[0])
    if not values:
        return Scale(0, 1, height)
    low, high = min(values), max(values)
    if curve.log_ratio is not None and low > 0 and high / low >= curve.log_ratio:
        ratio = (high / low) ** 0.06
        return Scale(low / ratio, high * ratio, height, log=True)
    if curve.axis_min is not None:
        low = min(low, curve.axis_min)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Scale(low if low == curve.axis_min else low - margin, high + margin, height)


def value_ticks(curve: ChartSeries, up: Scale) -> list[float]:
    """Values of the axis ticks."""
    if up.log:
        return log_ticks(up.low, up.high)
    return [
        row * curve.tick_unit
        for row in ticks(up.low / curve.tick_unit, up.high / curve.tick_unit, max(3, round(up.length / 45)))
    ]


def render_chart(curve: ChartSeries, marks: ChartMarkers, steps: tuple[int, int], *, height: int, columns: int) -> str:
    """The figure of one curve: title, drawing, axes and the script's data for the pointer."""
    across = Scale(steps[0], max(steps[1], steps[0] + 1), WIDTH)
    up = value_scale(curve, height)

    def to_pixels(point: Point) -> Point:
        return across(point[0]), height - up(point[1])

    rows = value_ticks(curve, up)
    pieces = [thin_piece(piece, across, columns) for piece in finite_segments(curve.points)]
    drawing = [
        *(horizontal_line("grid", height - up(row)) for row in rows),
        *_event_markers(marks, across, steps, height),
        *([horizontal_line("reference", height - up(curve.reference[0]))] if curve.reference else []),
        *_lines(curve, pieces, columns, to_pixels),
    ]
    return (
        f'<figure class="chart {curve.name}">'
        f"<figcaption><h3>{escape(curve.title)}</h3>{_notes(curve, up.log)}</figcaption>"
        f'<div class="plot" style="--height:{height}px">'
        f'<svg viewBox="0 0 {WIDTH} {height}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(_aria_label(curve))}">{"".join(drawing)}</svg>'
        f"{value_labels(curve, rows, up, height)}{_step_labels(across)}{_reference_label(curve, up, height)}"
        f'<i class="cross"></i><i class="dot"></i><output class="tip"></output></div>'
        f'<script type="application/json" class="points">{_tooltip_data(curve, pieces)}</script></figure>'
    )


def finite_segments(points: Iterable[Point]) -> list[list[Point]]:
    """Pieces of the curve between non-finite values."""
    pieces: list[list[Point]] = [[]]
    for point in points:
        if isfinite(point[1]):
            pieces[-1].append(point)
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def thin_piece(piece: Sequence[Point], across: Scale, columns: int) -> list[Point]:
    """Downsampled to its share of the columns, so that many gaps do not make a large page."""
    share = (across(piece[-1][0]) - across(piece[0][0])) / WIDTH
    return downsample(piece, max(1, ceil(columns * share)))


def svg_path(points: Sequence[Point], to_pixels: Callable[[Point], Point]) -> str:
    """A line through points, as the data of an SVG path."""
    pixels = map(to_pixels, points)
    return "".join(f"{'M' if index == 0 else 'L'}{x:.1f} {y:.1f}" for index, (x, y) in enumerate(pixels))


def _lines(
    curve: ChartSeries, pieces: Sequence[Sequence[Point]], columns: int, to_pixels: Callable[[Point], Point]
) -> list[str]:
    """The curve itself, thin under a smoothed one; dots if there are few points."""
    finite = [point for point in curve.points if isfinite(point[1])]
    is_smoothed = curve.smooth and smoothing_window(len(finite)) > 1
    raw = "".join(svg_path(piece, to_pixels) for piece in pieces)
    lines = [f'<path class="{"raw" if is_smoothed else "line"}" d="{raw}"/>']
    if is_smoothed:
        lines.append(f'<path class="line" d="{svg_path(downsample(smooth(finite), columns // 2), to_pixels)}"/>')
    if len(finite) <= MAX_DOTS:
        lines += [_dot(curve, point, to_pixels) for point in finite]
    return lines


def _dot(curve: ChartSeries, point: Point, to_pixels: Callable[[Point], Point]) -> str:
    """A line of zero length with round ends: a dot that stays round when stretched."""
    x, y = to_pixels(point)
    title = f"step {point[0]:.0f}: {curve.format_value(point[1])}"
    return f'<path class="point" d="M{x:.1f} {y:.1f}h0"><title>{escape(title)}</title></path>'


def _event_markers(marks: ChartMarkers, across: Scale, steps: tuple[int, int], height: int) -> list[str]:
    """Checkpoints as ticks at the bottom, restarts and spikes as lines through the chart, skipped steps at the top."""

    def line(name: str, title: str, step: int, top: float, bottom: float) -> str:
        x = across(step)
        return f'<path class="{name}" d="M{x:.1f} {top}V{bottom}"><title>{escape(title)}</title></path>'

    def vertical(name: str, label: str, step: int, top: float, bottom: float) -> str:
        return line(name, f"{label} step {step}", step, top, bottom)

    def inside(some: Sequence[int]) -> list[int]:
        ordered = sorted(some)
        return ordered[bisect_left(ordered, steps[0]) : bisect_right(ordered, steps[1])]

    return [
        *(vertical("resumed", "resumed from", step, 0, height) for step in inside(marks.resumed)),
        *(vertical("saved", "checkpoint at", step, height - 7, height) for step in inside(marks.saved)),
        *(line("spike", text, step, 0, height) for step, text in marks.spikes if steps[0] <= step <= steps[1]),
        *(vertical("skipped", "update skipped at", step, 0, 9) for step in inside(marks.skipped)),
    ]


def horizontal_line(css_class: str, y: float) -> str:
    """A line through the full drawing."""
    return f'<line class="{css_class}" x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _reference_label(curve: ChartSeries, up: Scale, height: int) -> str:
    if not curve.reference:
        return ""
    value, name = curve.reference
    bottom = up(value) / height
    return f'<span class="reference" style="bottom:{bottom:.2%}">{escape(name)} {value:.2f}</span>'


def value_labels(curve: ChartSeries, rows: Sequence[float], up: Scale, height: int) -> str:
    """The ticks' values beside the drawing."""
    text = curve.format_tick or curve.format_value
    return "".join(
        f'<span class="row" style="bottom:{up(row) / height:.2%}">{escape(text(row))}</span>' for row in rows
    )


def _step_labels(across: Scale) -> str:
    marks = [step for step in ticks(across.low, across.high, 6) if step == round(step)]
    return "".join(
        f'<span class="step{" minor" if index % 2 else ""}" style="left:{across(step) / WIDTH:.2%}">{step:,.0f}</span>'
        for index, step in enumerate(marks)
    )


def _notes(curve: ChartSeries, log: bool) -> str:
    count = sum(isfinite(value) for _, value in curve.points)
    notes = [curve.note] if curve.note else []
    if curve.smooth and smoothing_window(count) > 1:
        notes.append(f"smoothed over {smoothing_window(count)} steps")
    if log:
        notes.append("log scale")
    return f"<small>{escape(' · '.join(notes))}</small>" if notes else ""


def _aria_label(curve: ChartSeries) -> str:
    """The curve in a sentence, for screen readers."""
    finite = [point for point in curve.points if isfinite(point[1])]
    if not finite:
        return f"{curve.title}: no value"
    start, end = (f"{curve.format_value(value)} at step {step:.0f}" for step, value in (finite[0], finite[-1]))
    return f"{curve.title}: from {start} to {end}"


def _tooltip_data(curve: ChartSeries, pieces: Sequence[Sequence[Point]]) -> str:
    """For every drawn point its step and its formatted value, in the order of the path."""
    pairs = (f'[{step:.0f},"{escape(curve.format_value(value))}"]' for piece in pieces for step, value in piece)
    return f"[{','.join(pairs)}]"


@dataclass(frozen=True)
class BarSegment:
    """A segment of a bar."""

    css_class: str
    """Its class in the page's style, which sets its color."""
    value: float
    title: str


def render_bar(segments: Sequence[BarSegment], full: float) -> str:
    """Segments side by side, as wide as their share of `full`; a non-zero one is never too thin to see."""
    shown = "".join(
        f'<i class="{segment.css_class}" style="width:{segment.value / full:.2%}" title="{escape(segment.title)}"></i>'
        for segment in segments
        if segment.value > 0
    )
    return f'<div class="bar">{shown}</div>'


def render_bar_row(
    name: str, segments: Sequence[BarSegment], full: float, text: str, *, mark: str = "", note: str = ""
) -> str:
    """A bar between its name and its value, with a mark over it and a note behind it."""
    small = f"<small>{escape(note)}</small>" if note else ""
    return (
        f'<div class="level"><span>{escape(name)}</span><div class="track">{render_bar(segments, full)}{mark}</div>'
        f"<span>{escape(text)}</span>{small}</div>"
    )


def render_swatches(entries: Iterable[tuple[str, str]]) -> str:
    """The legend of a figure: CSS classes, each with the text for its color."""
    return "".join(f'<span><i class="{css_class}"></i>{escape(text)}</span>' for css_class, text in entries)
