"""What a dry run found, as tables for the terminal."""

from rich.table import Table

from danlu.report import wording
from danlu.spec.trace import Trace


def memory_table(traces: list[Trace]) -> Table:
    """Peak bytes of every rank, by what they are for."""
    table = Table(title="Memory at the peak of a step", title_justify="left")
    table.add_column("")
    for trace in traces:
        table.add_column(f"rank {trace.rank:,}", justify="right")
    for kind in dict.fromkeys(kind for trace in traces for kind in trace.peak_by_kind):
        table.add_row(kind, *(wording.size(trace.peak_by_kind.get(kind, 0)) for trace in traces))
    table.add_row("in all", *(wording.size(trace.peak) for trace in traces), style="bold")
    return table


def traffic_table(trace: Trace) -> Table:
    """What one rank puts into the network in a step, by axis and operation."""
    totals: dict[tuple[str, int, str, str], list[int]] = {}
    for call in trace.collectives:
        both = totals.setdefault((call.axes, call.ranks, call.level, call.operation), [0, 0])
        both[0] += call.count
        both[1] += call.total
    has_levels = any(call.level for call in trace.collectives)
    table = Table(title=f"Sent by rank {trace.rank:,} of {trace.world:,} in a step", title_justify="left")
    table.add_column("axis")
    table.add_column("ranks", justify="right")
    if has_levels:
        table.add_column("level")
    table.add_column("operation")
    table.add_column("calls", justify="right")
    table.add_column("bytes", justify="right")
    for (axes, ranks, level, operation), (count, total) in sorted(totals.items(), key=lambda item: -item[1][1]):
        place = [level] if has_levels else []
        table.add_row(axes, f"{ranks:,}", *place, operation, f"{count:,}", wording.size(total))
    return table
