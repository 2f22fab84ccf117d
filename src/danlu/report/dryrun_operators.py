"""The heaviest operators of a dry run, by module and phase: where the FLOPs go, and where the bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import get_args

from danlu.report import wording
from danlu.report.chart import Part, bar
from danlu.spec.trace import Operator, Phase, Trace

MOST = 12
"""Rows of a table."""


@dataclass(frozen=True)
class Share:
    """What one module does in one phase of the step."""

    module: str
    phase: Phase
    operators: tuple[str, ...]
    """Their names, the heaviest first."""
    calls: int
    amount: float


def heaviest(operators: Sequence[Operator], weigh: Callable[[Operator], float]) -> list[Share]:
    """Modules and phases by the weight of their operators, heaviest first; without those that weigh nothing."""
    groups: dict[tuple[str, Phase], list[Operator]] = {}
    for operator in operators:
        if weigh(operator) > 0:
            groups.setdefault((operator.module, operator.phase), []).append(operator)
    shares = [_share(module, phase, group, weigh) for (module, phase), group in groups.items()]
    return sorted(shares, key=lambda share: -share.amount)


def _share(module: str, phase: Phase, group: Sequence[Operator], weigh: Callable[[Operator], float]) -> Share:
    by_name: dict[str, float] = {}
    for operator in group:
        by_name[operator.name] = by_name.get(operator.name, 0.0) + weigh(operator)
    names = sorted(by_name, key=lambda name: -by_name[name])
    return Share(module, phase, tuple(names), sum(operator.count for operator in group), sum(by_name.values()))


def phase_flops(trace: Trace) -> dict[Phase, float]:
    """FLOPs of every phase, in the order of a step."""
    sums: dict[Phase, float] = dict.fromkeys(get_args(Phase), 0.0)
    for operator in trace.operators:
        sums[operator.phase] += operator.flops * operator.count
    return sums


def operator_tables(trace: Trace) -> str:
    """Two tables side by side: heaviest by FLOPs, and by bytes read and written."""
    flops = heaviest(trace.operators, lambda operator: operator.flops * operator.count)
    moved = heaviest(trace.operators, lambda operator: float(operator.bytes * operator.count))
    if not moved:
        return '<p class="soft">No operator was recorded.</p>'
    return (
        f'<div class="pair">{_table("By FLOPs", "FLOPs", flops, wording.work, _phases(trace))}'
        f"{_table('By bytes read and written', 'bytes', moved, wording.size, '')}</div>"
    )


def _phases(trace: Trace) -> str:
    """How the FLOPs fall on the phases, in a few words."""
    total = trace.flops
    return " · ".join(f"{wording.percent(some / total)} {phase}" for phase, some in phase_flops(trace).items() if some)


def _table(title: str, unit: str, shares: Sequence[Share], text: Callable[[float], str], note: str) -> str:
    total = sum(share.amount for share in shares)
    full = shares[0].amount if shares else 1.0
    lines = "".join(
        f'<tr><td class="wide"><code>{escape(share.module) or "outside any module"}</code>'
        f'<small title="{escape(", ".join(share.operators))}">{escape(_called(share))}</small></td>'
        f'<td><span class="phase p-{share.phase}">{share.phase}</span></td>'
        f'<td class="number">{text(share.amount)}</td><td class="share"><div>'
        f"{bar([Part(f'p-{share.phase}', share.amount, text(share.amount))], full)}"
        f"<span>{wording.percent(share.amount / total)}</span></div></td></tr>"
        for share in shares[:MOST]
    )
    rest = sum(share.amount for share in shares[MOST:])
    more = (
        f'<p class="soft">{len(shares) - MOST:,} more take {wording.percent(rest / total)} of {text(total)}.</p>'
        if len(shares) > MOST
        else f'<p class="soft">{text(total)} in all.</p>'
    )
    return (
        f'<div><div class="head"><h4>{title}</h4><small>{escape(note)}</small></div><table class="operators">'
        f'<tr><th>module</th><th>phase</th><th class="number">{unit}</th><th class="number">share</th></tr>'
        f"{lines}</table>{more}</div>"
    )


def _called(share: Share) -> str:
    """`8 calls · aten.mm`: how often, and of what, as far as there is room."""
    return f"{share.calls:,} call{'s' * (share.calls != 1)} · {', '.join(share.operators)}"
