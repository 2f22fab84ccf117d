"""Watches the ranks of a run on this host: whether it goes on, and who keeps it from that."""

import time
from math import inf
from pathlib import Path

from danlu.comm.flight_record import read_flights
from danlu.resilience.diagnosis import Diagnosis, RankView, diagnose
from danlu.resilience.process_state import read_process_state
from danlu.resilience.progress_watch import ProgressWatch
from danlu.resilience.straggler_watch import SlowRank, StragglerWatch

_CERTAIN = ("dead", "stopped", "file system", "mismatch")
_FIRST_DEADLINES = {"stopped": 5.0, "python lock": 30.0}
"""Seconds without a move until such a rank hangs, even if the pace of the run is not known yet."""
_SAMPLE_SECONDS = 0.3
"""How long a rank is looked at before it is said not to compute."""
_BUSY_SHARE = 0.5
"""Share of a core that a rank must have used to count as computing."""


def view_ranks(run: Path, *, newest: bool = False) -> dict[int, RankView]:
    """Every rank of a run on this host, with all its collectives or the `newest` of every group."""
    now = time.monotonic()
    return {
        flight.rank: RankView(flight, read_process_state(flight.pid), now - flight.heartbeat)
        for flight in read_flights(run, newest=newest)
    }


def moves_within(run: Path, seconds: float) -> bool:
    """Whether any rank of this host moves in so many seconds."""
    begun, deadline = _places(run), time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.05)
        if _places(run) != begun:
            return True
    return False


def _places(run: Path) -> dict[int, tuple[int, int, str, float]]:
    return {flight.rank: flight.place for flight in read_flights(run, collectives=False)}


class HostWatch:
    """Called now and then; answers with a diagnosis once per stall."""

    def __init__(self, run: Path) -> None:
        self.run, self.watch, self.stragglers = run, ProgressWatch(), StragglerWatch()
        self._busy_since: dict[int, tuple[float, float]] = {}

    def restart(self) -> None:
        """The ranks have started again: what they did before says nothing about now, but their pace is the same."""
        self.watch.restart()
        self.stragglers.restart()
        self._busy_since.clear()

    def look(self) -> Diagnosis | None:
        """A diagnosis if the run has just been found to hang."""
        now = time.monotonic()
        flights = read_flights(self.run, collectives=False)
        if not flights:  # not yet, or not any more
            return None
        self.watch.look(now, flights)
        if self.watch.deadline is None:
            return self._look_at_first_steps()
        if not self.watch.is_stalled():
            self._busy_since.clear()
            return None
        if self.watch.reported:
            return None
        found = diagnose(view_ranks(self.run))
        if not found.culprits or not self.watch.is_stalled(busy=self._slow(now, found)):
            return None
        self.watch.reported = True
        return found

    @property
    def quiet(self) -> float:
        """Seconds since any rank moved, as far as somebody looked."""
        return self.watch.quiet

    def look_for_stragglers(self) -> list[SlowRank]:
        """Ranks that have just been found to keep the others waiting."""
        return self.stragglers.look(view_ranks(self.run, newest=True))

    def _look_at_first_steps(self) -> Diagnosis | None:
        """While the pace is unknown only what no step ever does is a hang."""
        if self.watch.reported or self.watch.quiet < min(_FIRST_DEADLINES.values()):
            return None
        found = diagnose(view_ranks(self.run))
        limits = [_FIRST_DEADLINES.get(culprit.cause, inf) for culprit in found.culprits]
        if self.watch.quiet < min(limits, default=inf):
            return None
        self.watch.reported = True
        return found

    def _slow(self, now: float, found: Diagnosis) -> bool:
        """Whether somebody who is waited for computes, or would if it got a core: then the run is slow, not stuck."""
        if any(culprit.cause in _CERTAIN for culprit in found.culprits):
            return False
        slow = []
        for culprit in found.culprits:
            process = read_process_state(culprit.pid)
            began, before = self._busy_since.setdefault(culprit.rank, (now, process.cpu_seconds))
            computes = process.cpu_seconds - before > _BUSY_SHARE * (now - began)
            if now - began < _SAMPLE_SECONDS:
                slow.append(True)  # not known yet
            elif culprit.cause == "python lock":
                slow.append(process.runnable and not computes)  # a loop that keeps the lock computes too
            else:
                slow.append(process.runnable or computes)
        return any(slow)
