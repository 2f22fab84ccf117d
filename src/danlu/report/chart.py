"""Curves over steps as inline SVG: light at any number of steps, sharp at any width, readable without a script.

The drawing stretches with the page (its strokes do not), so text stands beside it in HTML, placed
in per cent: one chart serves a wide screen, a telephone and paper.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from math import ceil, floor, isfinite, log10

WIDTH = 1000
"""Of every drawing, in its own units; the page stretches it."""
DOTS = 60
"""Up to so many points are drawn as dots too, each with its own title."""

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One figure over the steps of a run."""

    name: str
    """A word for the page's style and script."""
    title: str
    points: Sequence[Point]
    """Step and value, in order; a value that is not finite leaves a gap."""
    text: Callable[[float], str]
    """How a value is written."""
    row_text: Callable[[float], str] | None = None
    """How a round value on the axis is written, where that is shorter."""
    unit: float = 1.0
    """What the axis counts in round numbers of: 1024³ for bytes shown in GiB."""
    note: str = ""
    smooth: bool = False
    floor: float | None = None
    """Where the scale begins, unless a value lies below."""
    log_from: float | None = None
    """Ratio of the highest to the lowest value from which the scale is logarithmic; never when left out."""
    reference: tuple[float, str] | None = None
    """A level to compare with, and its name."""


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Moments of a run that every chart shows."""

    saved: Sequence[int] = ()
    resumed: Sequence[int] = ()
    skipped: Sequence[int] = ()


@dataclass(frozen=True)
class Scale:
    """Values to places between 0 and `length`."""

    low: float
    high: float
    length: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Where a value lies."""
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


def binary_unit(most: float) -> float:
    """The largest of B, KiB, MiB, … that a number of bytes is at least two of: what its axis counts in."""
    unit = 1.0
    while most >= 2 * 1024 * unit:
        unit *= 1024
    return unit


def decades(low: float, high: float) -> list[float]:
    """Round values within `low` to `high` for a logarithmic scale: powers of ten, and more between them if need be."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    values: list[float] = []
    for times in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        all_values = (float(f"{many * 10.0**power:.12g}") for power in powers for many in times)
        values = [value for value in all_values if low <= value <= high]
        if len(values) >= 4:
            break
    return values[:: ceil(len(values) / 7)] if values else ticks(low, high, 4)


def thin(points: Sequence[Point], columns: int) -> list[Point]:
    """At most two points a pixel column, its lowest and its highest, and always the first and last of all.

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


def smoothed(points: Sequence[Point]) -> list[Point]:
    """A centred mean, taken twice so that a spike becomes a hill and not a box; it does not lag behind the curve."""
    values = [value for _, value in points]
    for _ in range(2):
        values = _centred_mean(values, smoothing(len(points)) // 2)
    return [(step, value) for (step, _), value in zip(points, values, strict=True)]


def _centred_mean(values: Sequence[float], half: int) -> list[float]:
    """The mean of `half` values to either side.

    At the beginning, where curves are steep, the window narrows on both sides; at the end it keeps
    what lies before, so that the last noisy step does not bend the curve.
    """
    sums = [0.0, *accumulate(values)]
    result = []
    for index in range(len(values)):
        first, past = index - min(half, index), index + min(half, index, len(values) - 1 - index) + 1
        result.append((sums[past] - sums[first]) / (past - first))
    return result


def smoothing(count: int) -> int:
    """Steps that a curve of `count` points is averaged over: about a fiftieth of them, odd; 1 for short runs."""
    return 1 if count < 100 else count // 100 * 2 + 3


def value_scale(curve: Curve, height: float) -> Scale:
    """From the lowest value to the highest with a little air."""
    values = [value for _, value in curve.points if isfinite(value)]
    if curve.reference:
        values.append(curve.reference[0])
    if not values:
        return Scale(0, 1, height)
    low, high = min(values), max(values)
    if curve.log_from is not None and low > 0 and high / low >= curve.log_from:
        ratio = (high / low) ** 0.06
        return Scale(low / ratio, high * ratio, height, log=True)
    if curve.floor is not None:
        low = min(low, curve.floor)
    air = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Scale(low if low == curve.floor else low - air, high + air, height)


def _rows(curve: Curve, up: Scale) -> list[float]:
    """Values the axis names."""
    if up.log:
        return decades(up.low, up.high)
    return [row * curve.unit for row in ticks(up.low / curve.unit, up.high / curve.unit, max(3, round(up.length / 45)))]


def draw(curve: Curve, marks: Marks, steps: tuple[int, int], *, height: int, columns: int) -> str:
    """The figure of one curve: title, drawing, axes and what the script needs to answer the pointer."""
    across = Scale(steps[0], max(steps[1], steps[0] + 1), WIDTH)
    up = value_scale(curve, height)

    def place(point: Point) -> Point:
        return across(point[0]), height - up(point[1])

    rows = _rows(curve, up)
    pieces = [_thin_piece(piece, across, columns) for piece in _unbroken(curve.points)]
    drawing = [
        *(
            f'<line class="grid" x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
            for y in (place((0, v))[1] for v in rows)
        ),
        *_moments(marks, across, steps, height),
        *_reference(curve, place),
        *_lines(curve, pieces, columns, place),
    ]
    return (
        f'<figure class="chart {curve.name}">'
        f"<figcaption><h3>{escape(curve.title)}</h3>{_notes(curve, up.log)}</figcaption>"
        f'<div class="plot" style="--height:{height}px">'
        f'<svg viewBox="0 0 {WIDTH} {height}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(_spoken(curve))}">{"".join(drawing)}</svg>'
        f"{_row_labels(curve, rows, up, height)}{_step_labels(across)}{_reference_label(curve, up, height)}"
        f'<i class="cross"></i><i class="dot"></i><output class="tip"></output></div>'
        f'<script type="application/json" class="points">{_answers(curve, pieces)}</script></figure>'
    )


def _unbroken(points: Iterable[Point]) -> list[list[Point]]:
    """Pieces of the curve between values that are not finite."""
    pieces: list[list[Point]] = [[]]
    for point in points:
        if isfinite(point[1]):
            pieces[-1].append(point)
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _thin_piece(piece: Sequence[Point], across: Scale, columns: int) -> list[Point]:
    """Its own share of the columns, so that many gaps do not make a heavy page."""
    share = (across(piece[-1][0]) - across(piece[0][0])) / WIDTH
    return thin(piece, max(1, ceil(columns * share)))


def _path(points: Sequence[Point], place: Callable[[Point], Point]) -> str:
    return "".join(f"{'M' if index == 0 else 'L'}{x:.1f} {y:.1f}" for index, (x, y) in enumerate(map(place, points)))


def _lines(curve: Curve, pieces: Sequence[Sequence[Point]], columns: int, place: Callable[[Point], Point]) -> list[str]:
    """The curve itself, thin where a smoothed one lies over it; dots where there are few."""
    finite = [point for point in curve.points if isfinite(point[1])]
    is_smoothed = curve.smooth and smoothing(len(finite)) > 1
    raw = "".join(_path(piece, place) for piece in pieces)
    lines = [f'<path class="{"raw" if is_smoothed else "line"}" d="{raw}"/>']
    if is_smoothed:
        lines.append(f'<path class="line" d="{_path(thin(smoothed(finite), columns // 2), place)}"/>')
    if len(finite) <= DOTS:
        lines += [_dot(curve, point, place) for point in finite]
    return lines


def _dot(curve: Curve, point: Point, place: Callable[[Point], Point]) -> str:
    """A line of no length with round ends: a dot that the stretching leaves round."""
    x, y = place(point)
    title = f"step {point[0]:.0f}: {curve.text(point[1])}"
    return f'<path class="point" d="M{x:.1f} {y:.1f}h0"><title>{escape(title)}</title></path>'


def _moments(marks: Marks, across: Scale, steps: tuple[int, int], height: int) -> list[str]:
    """Checkpoints as ticks on the floor, restarts as lines through the chart, skipped steps along the ceiling."""

    def vertical(name: str, label: str, step: int, top: float, bottom: float) -> str:
        x = across(step)
        return f'<path class="{name}" d="M{x:.1f} {top}V{bottom}"><title>{label} step {step}</title></path>'

    def inside(some: Sequence[int]) -> list[int]:
        ordered = sorted(some)
        return ordered[bisect_left(ordered, steps[0]) : bisect_right(ordered, steps[1])]

    return [
        *(vertical("resumed", "resumed from", step, 0, height) for step in inside(marks.resumed)),
        *(vertical("saved", "checkpoint at", step, height - 7, height) for step in inside(marks.saved)),
        *(vertical("skipped", "update skipped at", step, 0, 9) for step in inside(marks.skipped)),
    ]


def _reference(curve: Curve, place: Callable[[Point], Point]) -> list[str]:
    if not curve.reference:
        return []
    y = place((0, curve.reference[0]))[1]
    return [f'<line class="reference" x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>']


def _reference_label(curve: Curve, up: Scale, height: int) -> str:
    if not curve.reference:
        return ""
    value, name = curve.reference
    bottom = up(value) / height
    return f'<span class="reference" style="bottom:{bottom:.2%}">{escape(name)} {value:.2f}</span>'


def _row_labels(curve: Curve, rows: Sequence[float], up: Scale, height: int) -> str:
    text = curve.row_text or curve.text
    return "".join(
        f'<span class="row" style="bottom:{up(row) / height:.2%}">{escape(text(row))}</span>' for row in rows
    )


def _step_labels(across: Scale) -> str:
    marks = [step for step in ticks(across.low, across.high, 6) if step == round(step)]
    return "".join(
        f'<span class="step{" minor" if index % 2 else ""}" style="left:{across(step) / WIDTH:.2%}">{step:,.0f}</span>'
        for index, step in enumerate(marks)
    )


def _notes(curve: Curve, log: bool) -> str:
    count = sum(isfinite(value) for _, value in curve.points)
    notes = [curve.note] if curve.note else []
    if curve.smooth and smoothing(count) > 1:
        notes.append(f"smoothed over {smoothing(count)} steps")
    if log:
        notes.append("log scale")
    return f"<small>{escape(' · '.join(notes))}</small>" if notes else ""


def _spoken(curve: Curve) -> str:
    """The curve in a sentence, for those who hear the page."""
    finite = [point for point in curve.points if isfinite(point[1])]
    if not finite:
        return f"{curve.title}: no value"
    (first, start), (last, end) = finite[0], finite[-1]
    return f"{curve.title}: from {curve.text(start)} at step {first:.0f} to {curve.text(end)} at step {last:.0f}"


def _answers(curve: Curve, pieces: Sequence[Sequence[Point]]) -> str:
    """For every drawn point its step and how its value is written, in the order of the path."""
    pairs = (f'[{step:.0f},"{escape(curve.text(value))}"]' for piece in pieces for step, value in piece)
    return f"[{','.join(pairs)}]"


@dataclass(frozen=True)
class Part:
    """A piece of a bar."""

    tone: str
    """Its class in the page's style, which colours it."""
    value: float
    title: str


def bar(parts: Sequence[Part], full: float) -> str:
    """Pieces side by side, as wide as their share of `full`; what is there is never too thin to see."""
    pieces = "".join(
        f'<i class="{part.tone}" style="width:{part.value / full:.2%}" title="{escape(part.title)}"></i>'
        for part in parts
        if part.value > 0
    )
    return f'<div class="bar">{pieces}</div>'
