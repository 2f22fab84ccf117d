"""Faults that a run survived: as line, summary and table."""

from collections.abc import Sequence
from html import escape

from danlu.report.checkpoints import format_short_duration
from danlu.spec import RecoveryEvent

_SOURCES = {
    "memory": "from the state of step {step:,} in memory",
    "checkpoint": "from the checkpoint of step {step:,}",
    "start": "from the first step",
}


def format_recovery(event: RecoveryEvent) -> str:
    """What happened, what was done about it, and how long that took."""
    return f"{event.cause}; {format_remedy(event)}"


def format_remedy(event: RecoveryEvent) -> str:
    """What was done about a fault, and how long that took."""
    count = len(event.ranks)
    who = f"rank{'s' * (count > 1)} {', '.join(map(str, event.ranks[:8]))}{' …' * (count > 8)} replaced"
    source = _SOURCES[event.source].format(step=event.step)
    return f"{who if count else 'connected again'}, went on {source} after {event.seconds:.2f} s"


def format_recovery_totals(recoveries: Sequence[RecoveryEvent]) -> str:
    """All faults in one line: `3 survived: 4 ranks replaced, 2.9 s until ready again`."""
    replaced = sum(len(event.ranks) for event in recoveries)
    seconds = format_short_duration(sum(event.seconds for event in recoveries))
    return (
        f"{len(recoveries):,} survived: {replaced:,} rank{'s' * (replaced != 1)} replaced, {seconds} until ready again"
    )


def recoveries_card(recoveries: Sequence[RecoveryEvent]) -> str:
    """The page's table of faults."""
    if not recoveries:
        return ""
    rows = "".join(
        f'<tr><td class="number">{event.step:,}</td><td class="wide">{escape(event.cause)}</td>'
        f'<td class="wide">{escape(format_remedy(event))}</td></tr>'
        for event in recoveries
    )
    return (
        f'<details class="card"><summary>Faults<small>{escape(format_recovery_totals(recoveries))}</small></summary>'
        f'<table><tr><th class="number">step</th><th>happened</th><th>done</th></tr>{rows}</table></details>'
    )
