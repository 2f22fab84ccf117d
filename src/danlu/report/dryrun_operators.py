"""The heaviest operators of a dry run, by module and phase: where the FLOPs go, and where the bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import get_args

from danlu.report import formatting
from danlu.report.chart import BarSegment, render_bar
from danlu.spec.trace import OperatorStats, Phase, Trace

MAX_ROWS = 12
"""Rows of a table."""


@dataclass(frozen=True)
class ModulePhaseCost:
    """Cost of one module in one phase of the step."""

    module: str
    phase: Phase
    operators: tuple[str, ...]
    """Their names, the heaviest first."""
    calls: int
    amount: float


def top_modules(operators: Sequence[OperatorStats], weigh: Callable[[OperatorStats], float]) -> list[ModulePhaseCost]:
    """Modules and phases by the cost of their operators, heaviest first; without those of zero cost."""
    groups: dict[tuple[str, Phase], list[OperatorStats]] = {}
    for operator in operators:
        if weigh(operator) > 0:
            groups.setdefault((operator.module, operator.phase), []).append(operator)
    costs = []
    for (module, phase), group in groups.items():
        by_name: dict[str, float] = {}
        for operator in group:
            by_name[operator.name] = by_name.get(operator.name, 0.0) + weigh(operator)
        names = tuple(sorted(by_name, key=lambda name: -by_name[name]))
        calls = sum(operator.count for operator in group)
        costs.append(ModulePhaseCost(module, phase, names, calls, sum(by_name.values())))
    return sorted(costs, key=lambda cost: -cost.amount)


def phase_flops(trace: Trace) -> dict[Phase, float]:
    """FLOPs of every phase, in the order of a step."""
    sums: dict[Phase, float] = dict.fromkeys(get_args(Phase), 0.0)
    for operator in trace.operators:
        sums[operator.phase] += operator.flops * operator.count
    return sums


def operator_tables(trace: Trace) -> str:
    """Two tables side by side: heaviest by FLOPs, and by bytes read and written."""
    flops = top_modules(trace.operators, lambda operator: operator.flops * operator.count)
    moved = top_modules(trace.operators, lambda operator: float(operator.bytes * operator.count))
    if not moved:
        return '<p class="soft">No operator was recorded.</p>'
    return (
        f'<div class="pair">{_table("By FLOPs", "FLOPs", flops, formatting.flop_count, _phases(trace))}'
        f"{_table('By bytes read and written', 'bytes', moved, formatting.size, '')}</div>"
    )


def _phases(trace: Trace) -> str:
    """The share of the FLOPs of each phase."""
    total = trace.flops
    return " · ".join(
        f"{formatting.percent(some / total)} {phase}" for phase, some in phase_flops(trace).items() if some
    )


def _table(title: str, unit: str, shares: Sequence[ModulePhaseCost], text: Callable[[float], str], note: str) -> str:
    total = sum(share.amount for share in shares)
    full = shares[0].amount if shares else 1.0
    lines = "".join(
        f'<tr><td class="wide"><code>{escape(share.module) or "outside any module"}</code>'
        f'<small title="{escape(", ".join(share.operators))}">{escape(_format_calls(share))}</small></td>'
        f'<td><span class="phase p-{share.phase}">{share.phase}</span></td>'
        f'<td class="number">{text(share.amount)}</td><td class="share"><div>'
        f"{render_bar([BarSegment(f'p-{share.phase}', share.amount, text(share.amount))], full)}"
        f"<span>{formatting.percent(share.amount / total)}</span></div></td></tr>"
        for share in shares[:MAX_ROWS]
    )
    rest = sum(share.amount for share in shares[MAX_ROWS:])
    more = (
        f'<p class="soft">{len(shares) - MAX_ROWS:,} more take {formatting.percent(rest / total)} of {text(total)}.</p>'
        if len(shares) > MAX_ROWS
        else f'<p class="soft">{text(total)} in total.</p>'
    )
    return (
        f'<div><div class="head"><h4>{title}</h4><small>{escape(note)}</small></div><table class="operators">'
        f'<tr><th>module</th><th>phase</th><th class="number">{unit}</th><th class="number">share</th></tr>'
        f"{lines}</table>{more}</div>"
    )


def _format_calls(share: ModulePhaseCost) -> str:
    """`8 calls · aten.mm`: how often, and which operators."""
    return f"{share.calls:,} call{'s' * (share.calls != 1)} · {', '.join(share.operators)}"
