"""The results of a dry run as tables for the terminal."""

from rich.table import Table

from danlu.report import formatting
from danlu.report.dryrun_memory import describe_instant
from danlu.report.dryrun_traffic import traffic_rows
from danlu.spec.trace import MEMORY_KINDS, DryRun, Trace

TOP_OPERATORS = 8
"""Operators in the table of the heaviest."""


def memory_table(run: DryRun) -> Table:
    """Peak bytes of every rank by kind."""
    table = Table("", title="Memory at the peak of a step", title_justify="left")
    for trace in run.traces:
        table.add_column(f"rank {trace.rank:,}", justify="right")
    for column, kind in enumerate(MEMORY_KINDS):
        if any(trace.peak.held[column] for trace in run.traces):
            table.add_row(kind, *(formatting.size(trace.peak.held[column]) for trace in run.traces))
    table.add_row("total", *(formatting.size(trace.peak.total) for trace in run.traces), style="bold")
    if run.memory_limit is not None:
        shares = (formatting.percent(trace.peak.total / run.memory_limit) for trace in run.traces)
        table.add_row(f"of {formatting.size(run.memory_limit)} a chip", *shares)
    return table


def traffic_table(trace: Trace) -> Table:
    """Payload and wire bytes of one rank's collectives in a step, by axis and operation."""
    has_levels = any(call.level for call in trace.collectives)
    table = Table(title=f"Sent by rank {trace.rank:,} of {trace.world:,} in a step", title_justify="left")
    for name in ("axis", "ranks", *(["level"] if has_levels else []), "operation", "calls", "payload", "wire"):
        table.add_column(name, justify="left" if name in ("axis", "level", "operation") else "right")
    for row in traffic_rows(trace):
        level = [row.level] if has_levels else []
        sizes = formatting.size(row.payload), formatting.size(row.wire)
        table.add_row(row.axes, f"{row.ranks:,}", *level, row.operation, f"{row.calls:,}", *sizes)
    return table


def operator_table(trace: Trace) -> Table:
    """The operators that take the most FLOPs of one rank's step, and the total."""
    calls: dict[tuple[str, str, str], list[float]] = {}
    for operator in trace.operators:
        both = calls.setdefault((operator.name, operator.module, operator.phase), [0, 0.0])
        both[0] += operator.count
        both[1] += operator.flops * operator.count
    heaviest = sorted(calls.items(), key=lambda item: -item[1][1])[:TOP_OPERATORS]
    title = f"Heaviest operators of rank {trace.rank:,}"
    table = Table("operator", "module", "phase", title=title, title_justify="left")
    unit, scale = ("TFLOPs", 1e12) if trace.flops >= 1e11 else ("GFLOPs", 1e9)
    for name in ("calls", unit):
        table.add_column(name, justify="right")
    for (name, module, phase), (count, flops) in heaviest:
        short = name.removeprefix("aten.").removeprefix("_").removeprefix("scaled_dot_product_")
        table.add_row(short, module, phase, f"{count:,.0f}", _amount(flops / scale))
    rest = trace.flops - sum(flops for _, (_, flops) in heaviest)
    total = sum(operator.count for operator in trace.operators)
    others = total - sum(count for _, (count, _) in heaviest)
    if others:
        table.add_row(f"{len(calls) - len(heaviest):,} others", "", "", f"{others:,.0f}", _amount(rest / scale))
    table.add_row("total", "", "", f"{total:,}", _amount(trace.flops / scale), style="bold")
    return table


def table_notes(run: DryRun) -> list[str]:
    """Notes on the tables: what runs at the peaks, which ranks a rank represents, and what was not run."""
    lines = []
    for trace in run.traces:
        folded = f"; {trace.folded:,} identical layers were extrapolated, not run" if trace.folded else ""
        lines.append(
            f"rank {trace.rank:,}: peak in {describe_instant(trace.peak)}; "
            f"represents {trace.stands_for:,} ranks{folded} ({formatting.duration(trace.seconds)})"
        )
    computed = [f"computed in {run.precision}"] if run.precision else []
    return [*computed, *lines, *run.notes]


def _amount(value: float) -> str:
    return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"
