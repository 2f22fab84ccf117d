"""Does a run still go on? A deadline from its own pace: nothing moves for longer than twice what was ever normal."""

from collections import deque
from collections.abc import Sequence

from danlu.comm.flight_record import RankFlight

STEP_PHASES = frozenset({"reading data", "forward and backward", "metrics", "update", "saving"})
"""Phases of every step; others come now and then, and take as long as they take."""
FIRST_STEPS = 10
"""Steps until the pace of a run is known: the first ones compile, open files and connect."""
REMEMBERED_STEPS = 64
MARGIN_SECONDS = 1.0
FACTOR = 2.0
RARE_PHASE_SECONDS = 60.0
"""Least deadline in a phase that is not of every step."""
BUSY_FACTOR = 5.0
"""A rank that computes, or would if it got a core, is slow rather than stuck: how much more time it gets."""
_MAX_TICK = 1.0
"""Most seconds that count between two looks: after a pause of the watcher itself nothing is known."""


class ProgressWatch:
    """Looks at all ranks of a host now and then; tells since when none of them has moved, once that is too long."""

    def __init__(self) -> None:
        self.quiet = 0.0
        """Seconds since any rank moved, as far as somebody looked."""
        self.reported = False
        """Somebody was told of this stall: it is not the run's pace, and nothing is learned from it."""
        self._looked: float | None = None
        self._places: dict[int, tuple[int, int, str, float]] = {}
        self._longest = 0.0
        self._step = self._steps = 0
        self._history: deque[float] = deque(maxlen=REMEMBERED_STEPS)

    def look(self, now: float, flights: Sequence[RankFlight]) -> None:
        """Take in where the ranks are."""
        places = {flight.rank: flight.place for flight in flights}
        tick = 0.0 if self._looked is None else min(now - self._looked, _MAX_TICK)
        self._looked = now
        if places != self._places:
            if self._in_step and not self.reported:
                self._longest = max(self._longest, self.quiet + tick)
            self.quiet, self.reported, self._places = 0.0, False, places
        else:
            self.quiet += tick
        step = min((flight.step for flight in flights), default=0)
        if step > self._step:
            self._steps += 1
            if self._steps > 1:  # the first one began before anybody looked
                self._history.append(self._longest)
            self._step, self._longest = step, 0.0
        elif step < self._step:  # rewound, or started again
            self._step = step

    def restart(self) -> None:
        """The ranks have started again, at an earlier step perhaps; their pace is known."""
        self.quiet, self.reported, self._looked, self._places, self._longest = 0.0, False, None, {}, 0.0

    @property
    def deadline(self) -> float | None:
        """Seconds without a move after which the run hangs; None while its pace is unknown."""
        if len(self._history) < FIRST_STEPS:
            return None
        normal = FACTOR * max(self._history) + MARGIN_SECONDS
        return normal if self._in_step else max(normal, RARE_PHASE_SECONDS)

    @property
    def _in_step(self) -> bool:
        return all(phase in STEP_PHASES for _, _, phase, _ in self._places.values())

    def is_stalled(self, busy: bool = False) -> bool:
        """Whether nothing has moved for too long; longer is allowed if who is waited for is `busy` computing."""
        deadline = self.deadline
        return deadline is not None and self.quiet > deadline * (BUSY_FACTOR if busy else 1.0)
