"""Memory of a dry run: one rank's bytes over a step as a stacked chart, and the peaks of all ranks."""

from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import accumulate, groupby
from typing import NamedTuple, get_args

from danlu.report import formatting
from danlu.report.chart import (
    WIDTH,
    BarSegment,
    Scale,
    byte_unit,
    horizontal_line,
    render_bar_row,
    render_swatches,
    ticks,
)
from danlu.spec.trace import MEMORY_KINDS, MemoryKind, MemorySample, Phase, Trace

STACK_ORDER: tuple[MemoryKind, ...] = (
    "parameters",
    "optimizer",
    "gradients",
    "gathered",
    "activations",
    "communication",
)
"""The kinds from the bottom up: what lives for the full step is below what comes and goes."""
KIND_LABELS: dict[MemoryKind, str] = {
    "parameters": "parameters",
    "optimizer": "optimizer states",
    "gradients": "gradients",
    "gathered": "gathered parameters",
    "activations": "activations",
    "communication": "communication buffers",
}
HEIGHT = 260
COLUMNS = 200
"""Columns of a chart that react to the pointer."""
MAX_SPANS = COLUMNS // 2
"""Maximum changes of the microbatch marked below a chart; more would not match what happened."""
MAX_LIMIT_RATIO = 1.5
"""A limit of up to so many times the peak is drawn; a higher one would flatten the chart."""


def bytes_of_kind(instant: MemorySample, kind: MemoryKind) -> int:
    """Bytes of one kind at an instant."""
    return instant.held[MEMORY_KINDS.index(kind)]


def describe_location(instant: MemorySample) -> str:
    """What the rank was running: `backward of blocks.19.mlp.down`."""
    return f"{instant.phase} of {instant.module}" if instant.module else instant.phase


def describe_instant(instant: MemorySample) -> str:
    """The same with its microbatch: `backward of blocks.19.mlp.down, microbatch 3`."""
    microbatch = "" if instant.microbatch is None else f", microbatch {instant.microbatch}"
    return f"{describe_location(instant)}{microbatch}"


def max_memory_trace(traces: Sequence[Trace]) -> Trace:
    """The rank that needs the most memory."""
    return max(traces, key=lambda trace: trace.peak.total)


def _limit_to_draw(limit: int | None, peak: int) -> int | None:
    """The limit if it can be drawn together with a peak."""
    return limit if limit is not None and limit <= MAX_LIMIT_RATIO * peak else None


def peak_bars(traces: Sequence[Trace], limit: int | None) -> str:
    """A bar for every rank: its bytes at the peak, by kind, with the chip's memory as limit."""
    highest = max_memory_trace(traces).peak.total
    shown_limit = _limit_to_draw(limit, highest)
    full = max(highest, shown_limit or 0) * 1.01
    mark = f'<b class="limit" style="left:{shown_limit / full:.2%}"></b>' if shown_limit else ""
    rows = "".join(
        render_bar_row(
            f"rank {trace.rank:,}",
            _segments(trace.peak),
            full,
            formatting.size(trace.peak.total),
            mark=mark,
            note=describe_location(trace.peak),
        )
        for trace in traces
    )
    key = render_swatches((f"k-{kind}", KIND_LABELS[kind]) for kind in STACK_ORDER)
    line = f'<span><b class="limit"></b>{formatting.round_size(shown_limit)} of a chip</span>' if shown_limit else ""
    return f'<div class="card"><div class="levels named">{rows}</div><p class="swatches soft">{key}{line}</p></div>'


def _segments(instant: MemorySample) -> list[BarSegment]:
    return [
        BarSegment(
            f"k-{kind}",
            bytes_of_kind(instant, kind),
            f"{KIND_LABELS[kind]}: {formatting.size(bytes_of_kind(instant, kind))}",
        )
        for kind in STACK_ORDER
    ]


def memory_figure(trace: Trace, limit: int | None) -> str:
    """One rank's memory over the step, with the table of its peak, which is also the legend."""
    instants = sorted({*trace.memory, trace.peak}, key=lambda instant: instant.at)
    across = Scale(instants[0].at, max(instants[-1].at, instants[0].at + 1), WIDTH)
    columns = _columns(instants, across)
    shown_limit = _limit_to_draw(limit, trace.peak.total)
    up = Scale(0, max(trace.peak.total, shown_limit or 0, 1) * 1.06, HEIGHT)
    unit = byte_unit(up.high)
    rows = [row * unit for row in ticks(0, up.high / unit, 5)]
    grid = [horizontal_line("grid", HEIGHT - up(row)) for row in rows]
    x, y = across(trace.peak.at), HEIGHT - up(trace.peak.total)
    mark = f'<path class="peak" d="M{x:.1f} -6V{y:.1f}"/><path class="peak dot-end" d="M{x:.1f} {y:.1f}h0"/>'
    drawing = [*grid, *_areas(columns, across, up), *_hover_columns(columns), mark]
    if shown_limit is not None:
        drawing.append(horizontal_line("limit", HEIGHT - up(shown_limit)))
    label = f"Memory of rank {trace.rank} over a step: {formatting.size(trace.peak.total)} at the peak"
    return (
        '<div class="memory-columns"><figure class="memory-chart">'
        f'<div class="plot" style="--height:{HEIGHT}px"><svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" '
        f'role="img" aria-label="{escape(label)}">{"".join(drawing)}</svg>'
        f"{_labels(rows, up)}{_limit_label(shown_limit, up)}{_peak_label(trace.peak, across)}</div>"
        f"{_strips([column[0] for column in columns.values()], across)}</figure>{_peak_table(trace, limit)}</div>"
    )


def _labels(rows: Sequence[float], up: Scale) -> str:
    return "".join(
        f'<span class="row" style="bottom:{up(row) / HEIGHT:.2%}">{formatting.round_size(row) if row else "0"}</span>'
        for row in rows
    )


def _columns(instants: Sequence[MemorySample], across: Scale) -> dict[int, list[MemorySample]]:
    """Instants by their column of the chart: however many there are, the page stays small."""
    columns: dict[int, list[MemorySample]] = {}
    for instant in instants:
        columns.setdefault(min(int(across(instant.at) / WIDTH * COLUMNS), COLUMNS - 1), []).append(instant)
    return columns


def _highest(column: Sequence[MemorySample]) -> MemorySample:
    return max(column, key=lambda instant: instant.total)


def _areas(columns: dict[int, list[MemorySample]], across: Scale, up: Scale) -> Iterator[str]:
    """A band for every kind that is ever held, each on top of the one before.

    The lowest and the highest instant of a column are drawn, so a spike of a single operator stays visible.
    """
    drawn: list[MemorySample] = []
    for column in columns.values():
        ends = {min(column, key=lambda instant: instant.total), _highest(column)}
        drawn += sorted(ends, key=lambda instant: instant.at)
    tops = [list(accumulate((bytes_of_kind(instant, kind) for kind in STACK_ORDER), initial=0)) for instant in drawn]
    xs = [across(instant.at) for instant in drawn]
    for level, kind in enumerate(STACK_ORDER):
        if not any(bytes_of_kind(instant, kind) for instant in drawn):
            continue
        over = [(x, HEIGHT - up(top[level + 1])) for x, top in zip(xs, tops, strict=True)]
        under = [(x, HEIGHT - up(top[level])) for x, top in zip(xs, tops, strict=True)]
        outline = "L".join(f"{x:.1f} {y:.1f}" for x, y in [*over, *reversed(under)])
        yield f'<path class="area k-{kind}" d="M{outline}Z"/>'


def _hover_columns(columns: dict[int, list[MemorySample]]) -> Iterator[str]:
    """Columns that react to the pointer, each with its highest instant."""
    width = WIDTH / COLUMNS
    for (column, instants), after in zip(columns.items(), [*columns, COLUMNS][1:], strict=True):
        yield (
            f'<rect class="hit" x="{column * width:.1f}" width="{(after - column) * width:.1f}" height="{HEIGHT}">'
            f"<title>{escape(_tooltip(_highest(instants)))}</title></rect>"
        )


def _tooltip(instant: MemorySample) -> str:
    kinds = [
        f"{KIND_LABELS[kind]} {formatting.size(bytes_of_kind(instant, kind))}"
        for kind in reversed(STACK_ORDER)
        if bytes_of_kind(instant, kind)
    ]
    return "\n".join([describe_instant(instant), f"{formatting.size(instant.total)} total", *kinds])


def _peak_label(peak: MemorySample, across: Scale) -> str:
    """What runs at the peak, above the chart, on the side of the mark that has room."""
    share = across(peak.at) / WIDTH
    if share < 0.35:
        side = f"left:{share:.2%}"
    elif share > 0.65:
        side = f"right:{1 - share:.2%}"
    else:
        side = f"left:{share:.2%};transform:translateX(-50%)"
    microbatch = "" if peak.microbatch is None else f" · microbatch {peak.microbatch}"
    location = escape(f"in {describe_location(peak)}{microbatch}")
    return f'<span class="peak" style="{side}"><b>{formatting.size(peak.total)}</b> {location}</span>'


def _limit_label(limit: int | None, up: Scale) -> str:
    if limit is None:
        return ""
    return (
        f'<span class="limit" style="bottom:{up(limit) / HEIGHT:.2%}">{formatting.round_size(limit)} of a chip</span>'
    )


class _Span(NamedTuple):
    """Consecutive instants with the same value."""

    what: str
    start: float
    end: float
    """Positions between 0 and 1."""


def _spans(instants: Sequence[MemorySample], across: Scale, what: Callable[[MemorySample], str]) -> list[_Span]:
    firsts = [(key, next(group).at) for key, group in groupby(instants, what)]
    ends = [at for _, at in firsts[1:]] + [across.high]
    return [
        _Span(key, across(at) / WIDTH, across(end) / WIDTH)
        for (key, at), end in zip(firsts, ends, strict=True)
        if end > at
    ]


def _strips(instants: Sequence[MemorySample], across: Scale) -> str:
    """Below the axis: the phase and the microbatch."""
    phases = _spans(instants, across, lambda instant: instant.phase)
    strips = _strip("phase", phases, [f"p-{run.what}" for run in phases], room=0.012)
    seen = {instant.phase for instant in instants}
    key = render_swatches((f"p-{phase}", phase) for phase in get_args(Phase) if phase in seen)
    microbatches = _spans(instants, across, lambda i: "" if i.microbatch is None else str(i.microbatch))
    if len(microbatches) > MAX_SPANS:
        key += "<span>microbatches change too often to be marked</span>"
    elif any(run.what for run in microbatches):
        tones = [f"m{int(run.what) % 2}" if run.what else "none" for run in microbatches]
        strips += _strip("microbatch", microbatches, tones, room=0.011)
    return f'{strips}<p class="swatches soft">{key}</p>'


def _strip(name: str, runs: Sequence[_Span], tones: Sequence[str], room: float) -> str:
    """A band of colored pieces, labeled where they are wide enough (`room` is the share that a letter takes)."""
    pieces = "".join(
        f'<i class="{tone}" style="left:{run.start:.2%};width:{run.end - run.start:.2%}" '
        f'title="{escape(f"{name} {run.what}")}">'
        f"{escape(run.what) if run.end - run.start > room * (len(run.what) + 1) else ''}</i>"
        for run, tone in zip(runs, tones, strict=True)
    )
    return f'<div class="strip"><span>{name}</span>{pieces}</div>'


def _peak_table(trace: Trace, limit: int | None) -> str:
    """Bytes at the peak by kind, in the order of the stack from its top."""
    total = trace.peak.total
    held = [(kind, bytes_of_kind(trace.peak, kind)) for kind in reversed(STACK_ORDER)]
    rows = "".join(
        f'<tr class="{"many" if size else "one"}"><td><i class="k-{kind}"></i>{KIND_LABELS[kind]}</td>'
        f'<td class="number">{formatting.size(size)}</td>'
        f'<td class="number">{formatting.percent(size / total) if total else formatting.MISSING}</td></tr>'
        for kind, size in held
    )
    room = "" if limit is None else f'<p class="soft">{_format_headroom(total, limit)}</p>'
    return (
        '<div class="peak-table"><table class="swatched"><tr><th>at the peak</th><th class="number">bytes</th>'
        f'<th class="number">share</th></tr>{rows}<tr class="sum"><td>total</td>'
        f'<td class="number">{formatting.size(total)}</td><td></td></tr></table>{room}</div>'
    )


def _format_headroom(total: int, limit: int) -> str:
    left = limit - total
    headroom = f"{formatting.size(left)} free of" if left >= 0 else f"{formatting.size(-left)} over"
    return (
        f"{headroom} the chip's {formatting.round_size(limit)}. Tensors only: the process and its libraries use more."
    )
