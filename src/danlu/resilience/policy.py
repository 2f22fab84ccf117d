"""What to do about a fault: a pure function of what happened so far and of what is left to go on with."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FaultKind = Literal["killed", "exception", "explained", "hang", "network", "host"]
"""A process ended by a signal; by an error of its code; by one of Danlu's own errors, which says what is wrong; it was
stuck and therefore killed; connections broke, and nobody died; a host is gone."""
Tier = Literal["memory", "checkpoint", "start"]
"""Where a state comes from: memory of this or another host, the newest checkpoint, or the first step."""
MAX_FAULTS_PER_STEP = 3
"""Faults in a row, without one new step between them, after which a run stops."""
MAX_BATCH_FAILURES = 2
"""Errors of a program at the same step, after which the step's batch is quarantined."""
MAX_HOST_FAULTS = 2
"""Faults of a host after which it is not used any more."""


@dataclass(frozen=True)
class Fault:
    """Something went wrong: what it took, and how far the run was."""

    time: float
    ranks: tuple[int, ...]
    """Ranks that are lost; none if only connections are."""
    kind: FaultKind
    step: int
    """Steps done, by the rank that was furthest."""
    message: str
    host: str = ""
    """Where it happened."""


@dataclass(frozen=True)
class Means:
    """What is left to go on with."""

    memory: bool = True
    """The newest state of every rank, the lost ones included, is in memory of some host."""
    checkpoint: bool = True
    """There is a checkpoint."""
    spare_hosts: tuple[str, ...] = ()
    """Hosts that wait."""
    hosts: tuple[str, ...] = ()
    """Hosts of the run that answer."""
    smaller_plan: str = ""
    """A plan for the hosts that answer, as JSON; empty if there is none."""
    replicas: int = 0
    """Replicas of the state in that plan, if it is the run's with fewer of them; 0 if it is another."""


@dataclass(frozen=True)
class Retry:
    """All ranks go on in new connections."""

    tier: Tier


@dataclass(frozen=True)
class Replace:
    """New processes take the place of lost ranks; the others keep theirs."""

    ranks: tuple[int, ...]
    tier: Tier
    spare: str = ""
    """Host that they start on; empty for where they were."""


@dataclass(frozen=True)
class Restore:
    """All ranks start anew: going on with the old processes has led nowhere."""

    tier: Tier


@dataclass(frozen=True)
class Shrink:
    """Go on with fewer replicas of the state."""

    replicas: int
    tier: Tier


@dataclass(frozen=True)
class Replan:
    """Go on with another layout, for the hosts that are left."""

    hosts: tuple[str, ...]
    tier: Tier


@dataclass(frozen=True)
class Stop:
    """Give up; the newest state stays where it is."""

    reason: str


Decision = Retry | Replace | Restore | Shrink | Replan | Stop


def decide(faults: Sequence[Fault], means: Means, max_faults: int = MAX_FAULTS_PER_STEP) -> Decision:
    """What to do about the newest of all faults so far.

    Every decision but `Stop` is followed by a new step or by another fault, and `max_faults` faults without a new step
    are a `Stop`: a run of finitely many steps ends. The state is always the newest that exists.
    """
    fault = faults[-1]
    in_vain = _faults_in_vain(faults)
    quarantined = quarantined_steps(faults)
    if fault.kind == "explained":
        return Stop(fault.message)
    if in_vain >= max_faults and fault.step not in quarantined:
        return Stop(f"{in_vain} faults without a new step since step {fault.step:,}, the last one: {fault.message}")
    if in_vain >= max_faults + MAX_BATCH_FAILURES:
        return Stop(f"step {fault.step:,} fails without its batch too: {fault.message}")
    tier: Tier = "memory" if means.memory else "checkpoint" if means.checkpoint else "start"
    excluded = excluded_hosts(faults)
    if fault.kind == "host" or fault.host in excluded:
        return _without_host(fault, means, excluded, tier)
    if not fault.ranks:
        return Retry(tier) if in_vain == 1 else Restore(tier)
    if in_vain == 1 or fault.step in quarantined:
        return Replace(fault.ranks, tier)
    return Restore(tier)


def excluded_hosts(faults: Sequence[Fault]) -> frozenset[str]:
    """Hosts that are not used any more: what happened there twice will happen again."""
    counts = Counter(fault.host for fault in faults if fault.host and fault.kind in ("host", "hang"))
    return frozenset(host for host, count in counts.items() if count >= MAX_HOST_FAULTS)


def _without_host(fault: Fault, means: Means, excluded: frozenset[str], tier: Tier) -> Decision:
    spares = [spare for spare in means.spare_hosts if spare not in excluded]
    if spares:
        return Replace(fault.ranks, tier, spare=spares[0])
    if fault.host in means.hosts and fault.host not in excluded:
        return Replace(fault.ranks, tier)  # it answers again
    left = tuple(host for host in means.hosts if host not in excluded and host != fault.host)
    if means.smaller_plan and left:
        return Shrink(means.replicas, tier) if means.replicas else Replan(left, tier)
    return Stop(f"host {fault.host} is lost, and there is neither a spare nor a layout without it: {fault.message}")


def _faults_in_vain(faults: Sequence[Fault]) -> int:
    """Faults in a row, the newest included, since the run last got further than ever before."""
    count, furthest = 0, -1
    for fault in faults:
        count = 1 if fault.step > furthest else count + 1
        furthest = max(furthest, fault.step)
    return count


def quarantined_steps(faults: Sequence[Fault]) -> tuple[int, ...]:
    """Steps whose batches are not trained on, whatever is decided: the program failed there again and again."""
    counts = Counter(fault.step for fault in faults if fault.kind == "exception")
    return tuple(sorted(step for step, count in counts.items() if count >= MAX_BATCH_FAILURES))
