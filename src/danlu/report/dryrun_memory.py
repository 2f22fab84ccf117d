"""Memory in a dry run: what a rank holds over a step, drawn as a stack, and what all ranks hold at their peaks."""

from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import accumulate, groupby
from typing import NamedTuple, get_args

from danlu.report import wording
from danlu.report.chart import WIDTH, Part, Scale, bar, binary_unit, ticks
from danlu.spec.trace import KINDS, Instant, Kind, Phase, Trace

STACK: tuple[Kind, ...] = ("parameters", "optimiser", "gradients", "gathered", "activations", "communication")
"""The kinds from the floor up: what stays for the whole step lies below what comes and goes."""
KIND_WORDS: dict[Kind, str] = {
    "parameters": "parameters",
    "optimiser": "optimiser states",
    "gradients": "gradients",
    "gathered": "gathered parameters",
    "activations": "activations",
    "communication": "communication buffers",
}
HEIGHT = 260
COLUMNS = 200
"""Places of a chart that answer the pointer."""
MOST_RUNS = COLUMNS // 2
"""Changes of the microbatch that are marked below a chart; more would not be those that happened."""
NEAR = 1.5
"""A limit of up to so many times the peak is drawn; one further off would press the chart flat."""


def held(instant: Instant, kind: Kind) -> int:
    """Bytes of one kind at an instant."""
    return instant.held[KINDS.index(kind)]


def where(instant: Instant) -> str:
    """What the rank was at: `backward of blocks.19.mlp.down`."""
    return f"{instant.phase} of {instant.module}" if instant.module else instant.phase


def worst(traces: Sequence[Trace]) -> Trace:
    """The rank that needs most."""
    return max(traces, key=lambda trace: trace.peak.total)


def is_near(limit: int | None, peak: int) -> bool:
    """Whether a limit can be drawn beside a peak."""
    return limit is not None and limit <= NEAR * peak


def whole_size(value: float) -> str:
    """A round size without its zero: `80 GiB`."""
    return wording.size(value).replace(".0 ", " ")


def peaks(traces: Sequence[Trace], limit: int | None) -> str:
    """A bar for every rank: what it holds at its peak, by kind, against the chip's memory."""
    highest = worst(traces).peak.total
    shown_limit = limit if limit is not None and is_near(limit, highest) else None
    full = max(highest, shown_limit or 0) * 1.01
    mark = f'<b class="limit" style="left:{shown_limit / full:.2%}"></b>' if shown_limit else ""
    rows = "".join(
        f'<div class="level"><span>rank {trace.rank:,}</span>'
        f'<div class="track">{bar(_parts(trace.peak), full)}{mark}</div>'
        f"<span>{wording.size(trace.peak.total)}</span><small>{escape(where(trace.peak))}</small></div>"
        for trace in traces
    )
    key = "".join(f'<span><i class="k-{kind}"></i>{KIND_WORDS[kind]}</span>' for kind in STACK)
    line = f'<span><b class="limit"></b>{whole_size(shown_limit)} of a chip</span>' if shown_limit else ""
    return f'<div class="card"><div class="levels named">{rows}</div><p class="swatches soft">{key}{line}</p></div>'


def _parts(instant: Instant) -> list[Part]:
    return [
        Part(f"k-{kind}", held(instant, kind), f"{KIND_WORDS[kind]}: {wording.size(held(instant, kind))}")
        for kind in STACK
    ]


def memory_figure(trace: Trace, limit: int | None) -> str:
    """One rank's memory over the step, with the table of its peak, whose rows are the legend."""
    instants = sorted({*trace.memory, trace.peak}, key=lambda instant: instant.at)
    across = Scale(instants[0].at, max(instants[-1].at, instants[0].at + 1), WIDTH)
    columns = _columns(instants, across)
    shown_limit = limit if limit is not None and is_near(limit, trace.peak.total) else None
    up = Scale(0, max(trace.peak.total, shown_limit or 0, 1) * 1.06, HEIGHT)
    drawing = [*_grid(up), *_areas(columns, across, up), *_hits(columns), *_marks(trace.peak, across, up)]
    if shown_limit is not None:
        y = HEIGHT - up(shown_limit)
        drawing.append(f'<line class="limit" x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
    spoken = f"Memory of rank {trace.rank} over a step: {wording.size(trace.peak.total)} at the peak"
    return (
        '<div class="memory-columns"><figure class="memory-chart">'
        f'<div class="plot" style="--height:{HEIGHT}px"><svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" '
        f'role="img" aria-label="{escape(spoken)}">{"".join(drawing)}</svg>'
        f"{_labels(up)}{_limit_label(shown_limit, up)}{_peak_label(trace.peak, across)}</div>"
        f"{_strips([column[0] for column in columns.values()], across)}</figure>{_peak_table(trace, limit)}</div>"
    )


def _rows(up: Scale) -> list[float]:
    unit = binary_unit(up.high)
    return [row * unit for row in ticks(0, up.high / unit, 5)]


def _grid(up: Scale) -> Iterator[str]:
    for row in _rows(up):
        y = HEIGHT - up(row)
        yield f'<line class="grid" x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _labels(up: Scale) -> str:
    return "".join(
        f'<span class="row" style="bottom:{up(row) / HEIGHT:.2%}">{whole_size(row) if row else "0"}</span>'
        for row in _rows(up)
    )


def _columns(instants: Sequence[Instant], across: Scale) -> dict[int, list[Instant]]:
    """Instants by the column of the chart they fall into: however many there are, the page stays light."""
    columns: dict[int, list[Instant]] = {}
    for instant in instants:
        columns.setdefault(min(int(across(instant.at) / WIDTH * COLUMNS), COLUMNS - 1), []).append(instant)
    return columns


def _highest(column: Sequence[Instant]) -> Instant:
    return max(column, key=lambda instant: instant.total)


def _areas(columns: dict[int, list[Instant]], across: Scale, up: Scale) -> Iterator[str]:
    """A band for every kind that is ever held, each on top of the one before.

    Of a column the lowest and the highest instant are drawn, so a spike of a single operator stays visible.
    """
    drawn: list[Instant] = []
    for column in columns.values():
        ends = {min(column, key=lambda instant: instant.total), _highest(column)}
        drawn += sorted(ends, key=lambda instant: instant.at)
    tops = [list(accumulate((held(instant, kind) for kind in STACK), initial=0)) for instant in drawn]
    xs = [across(instant.at) for instant in drawn]
    for level, kind in enumerate(STACK):
        if not any(held(instant, kind) for instant in drawn):
            continue
        over = [(x, HEIGHT - up(top[level + 1])) for x, top in zip(xs, tops, strict=True)]
        under = [(x, HEIGHT - up(top[level])) for x, top in zip(xs, tops, strict=True)]
        outline = "L".join(f"{x:.1f} {y:.1f}" for x, y in [*over, *reversed(under)])
        yield f'<path class="area k-{kind}" d="M{outline}Z"/>'


def _hits(columns: dict[int, list[Instant]]) -> Iterator[str]:
    """Columns that answer the pointer, each with the highest instant that lies in it."""
    width = WIDTH / COLUMNS
    for (column, instants), after in zip(columns.items(), [*columns, COLUMNS][1:], strict=True):
        yield (
            f'<rect class="hit" x="{column * width:.1f}" width="{(after - column) * width:.1f}" height="{HEIGHT}">'
            f"<title>{escape(_told(_highest(instants)))}</title></rect>"
        )


def _told(instant: Instant) -> str:
    microbatch = "" if instant.microbatch is None else f", microbatch {instant.microbatch}"
    kinds = [
        f"{KIND_WORDS[kind]} {wording.size(held(instant, kind))}" for kind in reversed(STACK) if held(instant, kind)
    ]
    return "\n".join([f"{where(instant)}{microbatch}", f"{wording.size(instant.total)} in all", *kinds])


def _marks(peak: Instant, across: Scale, up: Scale) -> Iterator[str]:
    x, y = across(peak.at), HEIGHT - up(peak.total)
    yield f'<path class="peak" d="M{x:.1f} -6V{y:.1f}"/><path class="peak dot-end" d="M{x:.1f} {y:.1f}h0"/>'


def _peak_label(peak: Instant, across: Scale) -> str:
    """The peak's owner above the chart, on the side of the mark that has room."""
    share = across(peak.at) / WIDTH
    if share < 0.35:
        side = f"left:{share:.2%}"
    elif share > 0.65:
        side = f"right:{1 - share:.2%}"
    else:
        side = f"left:{share:.2%};transform:translateX(-50%)"
    microbatch = "" if peak.microbatch is None else f" · microbatch {peak.microbatch}"
    words = escape(f"in {where(peak)}{microbatch}")
    return f'<span class="peak" style="{side}"><b>{wording.size(peak.total)}</b> {words}</span>'


def _limit_label(limit: int | None, up: Scale) -> str:
    if limit is None:
        return ""
    return f'<span class="limit" style="bottom:{up(limit) / HEIGHT:.2%}">{whole_size(limit)} of a chip</span>'


class _Run(NamedTuple):
    """Instants in a row that share something."""

    what: str
    start: float
    end: float
    """Places between 0 and 1."""


def _runs(instants: Sequence[Instant], across: Scale, what: Callable[[Instant], str]) -> list[_Run]:
    firsts = [(key, next(group).at) for key, group in groupby(instants, what)]
    ends = [at for _, at in firsts[1:]] + [across.high]
    return [
        _Run(key, across(at) / WIDTH, across(end) / WIDTH)
        for (key, at), end in zip(firsts, ends, strict=True)
        if end > at
    ]


def _strips(instants: Sequence[Instant], across: Scale) -> str:
    """Below the axis: which phase it was, and which microbatch."""
    phases = _runs(instants, across, lambda instant: instant.phase)
    strips = _strip("phase", phases, [f"p-{run.what}" for run in phases], room=0.012)
    seen = {instant.phase for instant in instants}
    key = "".join(f'<span><i class="p-{phase}"></i>{phase}</span>' for phase in get_args(Phase) if phase in seen)
    microbatches = _runs(instants, across, lambda i: "" if i.microbatch is None else str(i.microbatch))
    if len(microbatches) > MOST_RUNS:
        key += "<span>microbatches change too often to be marked</span>"
    elif any(run.what for run in microbatches):
        tones = [f"m{int(run.what) % 2}" if run.what else "none" for run in microbatches]
        strips += _strip("microbatch", microbatches, tones, room=0.011)
    return f'{strips}<p class="swatches soft">{key}</p>'


def _strip(name: str, runs: Sequence[_Run], tones: Sequence[str], room: float) -> str:
    """A band of coloured pieces; a word stands in those wide enough for it (`room` is the share a letter takes)."""
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
    rows = "".join(
        f'<tr class="{"many" if held(trace.peak, kind) else "one"}"><td><i class="k-{kind}"></i>{KIND_WORDS[kind]}</td>'
        f'<td class="number">{wording.size(held(trace.peak, kind))}</td>'
        f'<td class="number">{wording.percent(held(trace.peak, kind) / total) if total else wording.MISSING}</td></tr>'
        for kind in reversed(STACK)
    )
    room = "" if limit is None else f'<p class="soft">{_room(total, limit)}</p>'
    return (
        '<div class="peak-table"><table class="swatched"><tr><th>at the peak</th><th class="number">bytes</th>'
        f'<th class="number">share</th></tr>{rows}<tr class="sum"><td>in all</td>'
        f'<td class="number">{wording.size(total)}</td><td></td></tr></table>{room}</div>'
    )


def _room(total: int, limit: int) -> str:
    left = limit - total
    words = f"{wording.size(left)} left" if left >= 0 else f"{wording.size(-left)} too much"
    return f"{words} of the chip's {whole_size(limit)}. Tensors only: the process and its libraries hold more."
