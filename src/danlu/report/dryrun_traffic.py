"""What a rank of a dry run sends: bytes by level of the network and by axis of the mesh."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from danlu.report import wording
from danlu.report.chart import Part, bar
from danlu.spec.plan import DENSE_AXES
from danlu.spec.trace import Trace

AXES = (*DENSE_AXES, "ep")
"""Axes with a colour of their own; groups along several of them have the first one's, paler."""

RECEIVE = "receive"
"""The one operation of a trace whose bytes come in."""


@dataclass(frozen=True)
class Traffic:
    """One operation of a rank along one axis, over the whole step."""

    axes: str
    ranks: int
    level: str
    operation: str
    calls: int
    bytes: int

    @property
    def sent(self) -> int:
        """Bytes that leave the rank; what it receives is another's to count."""
        return 0 if self.operation == RECEIVE else self.bytes


def traffic(trace: Trace) -> list[Traffic]:
    """What a rank sends and receives in a step by axis, level and operation, most first."""
    sums: dict[tuple[str, int, str, str], list[int]] = {}
    for call in trace.collectives:
        both = sums.setdefault((call.axes, call.ranks, call.level, call.operation), [0, 0])
        both[0] += call.count
        both[1] += call.total
    rows = [Traffic(*key, calls=calls, bytes=size) for key, (calls, size) in sums.items()]
    return sorted(rows, key=lambda row: -row.bytes)


def sent(trace: Trace) -> int:
    """All bytes a rank sends in a step."""
    return sum(row.sent for row in traffic(trace))


def traffic_figure(trace: Trace, levels: Sequence[str]) -> str:
    """A bar for every level of the network, innermost first, coloured by axis; and the table behind it."""
    rows = traffic(trace)
    if not rows:
        return '<p class="soft">This rank sends nothing.</p>'
    named = [*levels, *dict.fromkeys(row.level for row in rows if row.level not in levels)]
    full = max(sum(row.sent for row in rows if row.level == level) for level in named) or 1
    bars = "".join(_level(level, [row for row in rows if row.level == level], full) for level in named)
    axes = sorted(dict.fromkeys(row.axes for row in rows), key=_order)
    key = "".join(f'<span><i class="{_tone(axis)}"></i>{escape(axis)}</span>' for axis in axes)
    return f'<div class="levels">{bars}</div><p class="swatches soft">{key}</p>{_table(rows, has_levels=bool(levels))}'


def _level(level: str, rows: Sequence[Traffic], full: float) -> str:
    by_axis: dict[str, int] = {}
    for row in rows:
        by_axis[row.axes] = by_axis.get(row.axes, 0) + row.sent
    parts = [
        Part(_tone(axis), size, f"{axis}: {wording.size(size)}")
        for axis, size in sorted(by_axis.items(), key=lambda item: _order(item[0]))
    ]
    total = wording.size(sum(by_axis.values())) if rows else "nothing"
    return (
        f'<div class="level"><span>{escape(level) or "network"}</span><div class="track">{bar(parts, full)}</div>'
        f"<span>{total}</span></div>"
    )


def _order(axis: str) -> tuple[int, str]:
    """Innermost axes first; what is no axis, last."""
    first = axis.split("·")[0]
    return (-AXES.index(first) if first in AXES else 1, axis)


def _tone(axis: str) -> str:
    first, several, _ = axis.partition("·")
    return f"a-{first if first in AXES else 'other'}{' mixed' if several else ''}"


def _table(rows: Sequence[Traffic], has_levels: bool) -> str:
    lines = "".join(
        f'<tr><td><i class="{_tone(row.axes)}"></i>{escape(row.axes)}</td><td class="number">{row.ranks:,}</td>'
        + (f"<td>{escape(row.level)}</td>" if has_levels else "")
        + f'<td><code>{escape(row.operation)}</code></td><td class="number">{row.calls:,}</td>'
        f'<td class="number">{wording.size(row.bytes)}</td></tr>'
        for row in rows
    )
    level = "<th>level</th>" if has_levels else ""
    return (
        f'<table class="swatched traffic"><tr><th>axis</th><th class="number">ranks</th>{level}<th>operation</th>'
        f'<th class="number">calls</th><th class="number">bytes</th></tr>{lines}</table>'
    )
