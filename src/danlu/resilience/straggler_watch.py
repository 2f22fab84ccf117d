"""Ranks that the others keep waiting for although the run goes on, found by looking again and again who waits for whom.

A rank waits if it sleeps in a collective that another has not entered. Where the host does not wait for collectives but
spins, or leaves that to its chip, nobody is seen to wait, and nobody is called slow.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from danlu.resilience.diagnosis import RankView, diagnose
from danlu.resilience.progress_watch import STEP_PHASES

LOOKS = 450
"""Looks at the run after which something is said about it: one that costs a ninth of the time is then seen 50 times."""
SLOW_SHARE = 0.07
"""Share of the others' time that they must have waited for a rank before it is called slow."""
SLOW_FACTOR = 3.0
"""How many times as long as for its peers."""
_WATCHED_PHASES = STEP_PHASES - {"saving"}
"""Ranks save different amounts, and it is known what that costs."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that the others wait for."""

    rank: int
    share: float
    """Of the other ranks' time, spent waiting for it."""
    phase: str
    """Where in the step it mostly is while they wait."""


class StragglerWatch:
    """Looks at all ranks of a run now and then; tells once who is slow, and again if it was not for a while."""

    def __init__(self, looks: int = LOOKS) -> None:
        self._window: deque[dict[int, tuple[float, str]]] = deque(maxlen=looks)
        self._stages: dict[int, int] = {}
        self._told: set[int] = set()

    def restart(self) -> None:
        """The ranks have started again, perhaps elsewhere."""
        self._window.clear()
        self._stages.clear()
        self._told.clear()

    def look(self, views: Mapping[int, RankView]) -> list[SlowRank]:
        """Take in where the ranks are; whoever has just been found to be slow."""
        if any(view.flight.phase not in _WATCHED_PHASES for view in views.values()):
            return []
        self._stages |= {rank: _stage(view) for rank, view in views.items()}
        self._window.append(_waited_for(views))
        if len(self._window) < (self._window.maxlen or 0):
            return []
        shares = self.shares()
        slow = {rank for rank in shares if self._is_slow(rank, shares)}
        new = sorted(slow - self._told)
        self._told = slow | {rank for rank in self._told if shares.get(rank, 0.0) > SLOW_SHARE / 2}
        return [SlowRank(rank, shares[rank], self._phase_of(rank)) for rank in new]

    def shares(self) -> dict[int, float]:
        """For every rank the share of the others' time that they spent waiting for it."""
        total = dict.fromkeys(self._stages, 0.0)
        for look in self._window:
            for rank, (weight, _) in look.items():
                total[rank] = total.get(rank, 0.0) + weight
        return {rank: weight / len(self._window) for rank, weight in total.items()}

    def _is_slow(self, rank: int, shares: Mapping[int, float]) -> bool:
        """Against ranks with the same work: those of other pipeline stages have another share of the model."""
        peers = [shares[each] for each in shares if each != rank and self._stages[each] == self._stages[rank]]
        return bool(peers) and shares[rank] > max(SLOW_SHARE, SLOW_FACTOR * sum(peers) / len(peers))

    def _phase_of(self, rank: int) -> str:
        phases: Counter[str] = Counter()
        for look in self._window:
            if rank in look:
                weight, phase = look[rank]
                phases[phase] += round(1000 * weight)
        return phases.most_common(1)[0][0]


def _waited_for(views: Mapping[int, RankView]) -> dict[int, tuple[float, str]]:
    """Who is waited for now: by which share of the other ranks, and where it is."""
    found = diagnose({rank: view if _may_wait(view) else _computing(view) for rank, view in views.items()})
    if found.collective is None or any(culprit.cause in ("network", "mismatch") for culprit in found.culprits):
        return {}
    weight = len(found.waiting) / max(1, len(views) - len(found.culprits))
    return {culprit.rank: (weight, culprit.phase) for culprit in found.culprits}


def _may_wait(view: RankView) -> bool:
    """A rank that has a core does not wait, even if others have not entered yet what it has begun ahead of time."""
    return not view.process.runnable


def _computing(view: RankView) -> RankView:
    records = tuple(replace(record, left=record.left or record.entered) for record in view.flight.records)
    return replace(view, flight=replace(view.flight, records=records))


def _stage(view: RankView) -> int:
    """The rank's place in the pipeline; 0 without one."""
    rank = view.flight.rank
    groups = (record.members for record in view.flight.records if record.axes == "pp" and rank in record.members)
    return next((members.index(rank) for members in groups), 0)
