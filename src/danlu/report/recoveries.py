"""Faults that a run survived, in words."""

from danlu.spec import RecoveryEvent

_SOURCES = {
    "memory": "from the state of step {step:,} in memory",
    "checkpoint": "from the checkpoint of step {step:,}",
    "start": "from the first step",
}


def format_recovery(event: RecoveryEvent) -> str:
    """What happened, what was done about it, and how long that took."""
    count = len(event.ranks)
    who = f"rank{'s' * (count > 1)} {', '.join(map(str, event.ranks[:8]))}{' …' * (count > 8)} replaced"
    source = _SOURCES[event.source].format(step=event.step)
    return f"{event.cause}; {who if count else 'connected again'}, goes on {source} after {event.seconds:.2f} s"
