"""A diagnosis in words."""

from collections.abc import Sequence

from danlu.comm.flight_record import CollectiveRecord
from danlu.resilience.diagnosis import Cause, Culprit, Diagnosis
from danlu.resilience.straggler_watch import SlowRank
from danlu.spec.byte_format import format_bytes

_MAX_RANKS = 8
_WHY: dict[Cause, str] = {
    "dead": "its process has ended",
    "stopped": "its process is stopped by a signal (SIGCONT lets it go on)",
    "file system": "it waits for a file system that does not answer",
    "python lock": "one of its threads keeps Python's lock, so that no other runs",
    "data": "it reads data",
    "storage": "it saves a checkpoint",
    "outside": "it is in code between two collectives",
    "network": "all ranks have entered the collective, and it does not end: the network between them, or the chip",
    "mismatch": "the ranks have entered different collectives: they do not run the same program",
}


def describe_diagnosis(found: Diagnosis) -> str:
    """Who keeps the run from going on, and why; in one line."""
    if not found.culprits:
        return "no rank can be blamed: none waits for another"
    parts = [_describe_culprits(found.culprits)]
    if found.collective is not None:
        where = describe_collective(found.collective)
        others = [rank for rank in found.waiting if rank not in {each.rank for each in found.culprits}]
        parts.append(f"{_ranks(others)} wait{'s' * (len(others) == 1)} for it in {where}" if others else f"in {where}")
    return "; ".join(parts)


def describe_slow_rank(slow: SlowRank) -> str:
    """Who is slow, and what that costs; in one line."""
    where = {"reading data": "reads its data"}.get(slow.phase, f"is in {slow.phase}")
    return (
        f"rank {slow.rank} is slow: the other ranks spend {slow.share:.0%} of their time waiting for it, mostly while "
        f"it {where}; compare its host with theirs (clock, memory, temperature, other processes)"
    )


def describe_collective(record: CollectiveRecord) -> str:
    """A collective as people name it."""
    size = f", {format_bytes(record.size)}" if record.size else ""
    return f"{record.operation} {record.sequence:,} of {record.axes or 'its group'}{size}"


def _describe_culprits(culprits: Sequence[Culprit]) -> str:
    first = culprits[0]
    if len(culprits) == 1:
        return f"rank {first.rank} (pid {first.pid}, after step {first.step:,}, {first.phase}): {_WHY[first.cause]}"
    causes = dict.fromkeys(each.cause for each in culprits)
    return f"{_ranks([each.rank for each in culprits])}: {', or '.join(_WHY[cause] for cause in causes)}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MAX_RANKS]))
    more = f" and {len(ranks) - _MAX_RANKS:,} more" if len(ranks) > _MAX_RANKS else ""
    return f"rank{'s' * (len(ranks) != 1)} {shown}{more}"
