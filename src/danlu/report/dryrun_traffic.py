"""Traffic of a rank of a dry run: bytes by level of the network and by axis of the mesh."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from danlu.report import formatting
from danlu.report.chart import BarSegment, render_bar_row, render_swatches
from danlu.spec.plan import DENSE_AXES
from danlu.spec.trace import Trace

COLORED_AXES = (*DENSE_AXES, "ep")
"""Axes with their own color; groups along several of them have the first one's, paler."""


@dataclass(frozen=True)
class TrafficRow:
    """One operation of a rank along one axis, over the full step."""

    axes: str
    ranks: int
    level: str
    operation: str
    calls: int
    payload: int
    """Bytes of the rank's inputs to the calls (of its outputs for a receive)."""
    wire: int
    """Bytes that the algorithm sends from this rank; received bytes count for their sender."""


def traffic_rows(trace: Trace) -> list[TrafficRow]:
    """A rank's traffic in a step by axis, level and operation, most first."""
    sums: dict[tuple[str, int, str, str], list[int]] = {}
    for call in trace.collectives:
        found = sums.setdefault((call.axes, call.ranks, call.level, call.operation), [0, 0, 0])
        for column, value in enumerate((call.count, call.total_payload, call.total_wire)):
            found[column] += value
    rows = [TrafficRow(*key, calls=calls, payload=payload, wire=wire) for key, (calls, payload, wire) in sums.items()]
    return sorted(rows, key=lambda row: (-row.wire, -row.payload))


def total_wire_bytes(trace: Trace) -> int:
    """All bytes a rank sends over the network in a step."""
    return sum(call.total_wire for call in trace.collectives)


def total_payload_bytes(trace: Trace) -> int:
    """All input bytes of a rank's collectives and sends in a step."""
    return sum(call.total_payload for call in trace.collectives if call.operation != "receive")


def traffic_figure(trace: Trace, levels: Sequence[str]) -> str:
    """A bar for every level of the network, innermost first, colored by axis; and its table."""
    rows = traffic_rows(trace)
    if not rows:
        return '<p class="soft">This rank sends nothing.</p>'
    named = [*levels, *dict.fromkeys(row.level for row in rows if row.level not in levels)]
    full = max(sum(row.wire for row in rows if row.level == level) for level in named) or 1
    bars = "".join(_level(level, [row for row in rows if row.level == level], full) for level in named)
    axes = sorted(dict.fromkeys(row.axes for row in rows), key=_order)
    key = render_swatches((_css_class(axis), axis) for axis in axes)
    return f'<div class="levels">{bars}</div><p class="swatches soft">{key}</p>{_table(rows, has_levels=bool(levels))}'


def _level(level: str, rows: Sequence[TrafficRow], full: float) -> str:
    by_axis: dict[str, int] = {}
    for row in rows:
        by_axis[row.axes] = by_axis.get(row.axes, 0) + row.wire
    segments = [
        BarSegment(_css_class(axis), size, f"{axis}: {formatting.size(size)}")
        for axis, size in sorted(by_axis.items(), key=lambda item: _order(item[0]))
    ]
    total = formatting.size(sum(by_axis.values())) if rows else "nothing"
    return render_bar_row(level or "network", segments, full, total)


def _order(axis: str) -> tuple[int, str]:
    """Innermost axes first; names that are not axes last."""
    first = axis.split("·")[0]
    return (-COLORED_AXES.index(first) if first in COLORED_AXES else 1, axis)


def _css_class(axis: str) -> str:
    first, several, _ = axis.partition("·")
    return f"a-{first if first in COLORED_AXES else 'other'}{' mixed' if several else ''}"


def _table(rows: Sequence[TrafficRow], has_levels: bool) -> str:
    lines = "".join(
        f'<tr><td><i class="{_css_class(row.axes)}"></i>{escape(row.axes)}</td><td class="number">{row.ranks:,}</td>'
        + (f"<td>{escape(row.level)}</td>" if has_levels else "")
        + f'<td><code>{escape(row.operation)}</code></td><td class="number">{row.calls:,}</td>'
        f'<td class="number">{formatting.size(row.payload)}</td>'
        f'<td class="number">{formatting.size(row.wire)}</td></tr>'
        for row in rows
    )
    level = "<th>level</th>" if has_levels else ""
    return (
        f'<table class="swatched traffic"><tr><th>axis</th><th class="number">ranks</th>{level}<th>operation</th>'
        f'<th class="number">calls</th><th class="number">payload</th><th class="number">wire</th></tr>{lines}</table>'
    )
