"""Time of a whole pipeline step in closed form, for searches; `simulate` gives it from the actions themselves.

1F1B (Narayanan et al., PipeDream-Flush; SC 2021): the slowest stage works on all microbatches, and the others' passes
of one microbatch come before and after. Interleaved: the same with passes a v-th as long (SC 2021, section 2.2).
Zero-bubble: gradients of weights fill the wait (Qi et al., "Zero bubble pipeline parallelism", 2023).
"""

from collections.abc import Sequence
from typing import NamedTuple

from danlu.spec.plan import Schedule


class StageTime(NamedTuple):
    """One rank's passes of one microbatch, all its stages together."""

    forward: float
    backward: float
    weights: float
    """Of `backward`, what can wait."""
    sending: float = 0.0
    """Exposed transfers of one microbatch, which keep the rank busy."""
    ahead: float = 0.0
    """Of a microbatch on its way to the next rank, and of its gradient back, while nothing hides it."""
    behind: float = 0.0
    """The same between this rank and the one before."""

    @property
    def slot(self) -> float:
        """Both passes with their transfers: what a rank takes for one microbatch."""
        return self.passes + self.sending

    @property
    def passes(self) -> float:
        """Both passes."""
        return self.forward + self.backward


def pipeline_time(stages: Sequence[StageTime], microbatches: int, schedule: Schedule, stages_per_rank: int) -> float:
    """Seconds from the first forward to the last backward over the ranks of one pipeline."""
    slowest = max(range(len(stages)), key=lambda rank: stages[rank].slot)
    steady = microbatches * stages[slowest].slot
    if len(stages) == 1:
        return steady
    if schedule == "zero-bubble":
        paths = _paths(stages, slowest)
        waits = [max(0.0, path - 2 * stage.weights) for path, stage in zip(paths, stages, strict=True)]
        return steady + (sum(waits) - waits[slowest]) / stages_per_rank
    if schedule == "zbv":
        # Forward, backward for inputs and for weights fill each other's waits as far as they are equal.
        waits = [abs(stage.backward - stage.weights - stage.forward) / 2 for stage in stages]
        return steady + sum(waits) - waits[slowest]
    return steady + _waits(stages, slowest, microbatches) / stages_per_rank


def _paths(stages: Sequence[StageTime], slowest: int) -> list[float]:
    """What a microbatch takes on every rank, with its way from there to the slowest one and back."""
    return [stage.passes + (stage.ahead if rank < slowest else stage.behind) for rank, stage in enumerate(stages)]


def _waits(stages: Sequence[StageTime], slowest: int, microbatches: int) -> float:
    """How long the slowest rank waits, for 1F1B.

    For the passes of the ranks before it, first and last; and twice for the ranks behind it: until its first backward,
    while it goes on with forwards, and after its last forward, while it goes on with backwards.
    """
    own, paths = stages[slowest], _paths(stages, slowest)
    before, behind = sum(paths[:slowest]), sum(paths[slowest + 1 :])
    ahead = min(len(stages) - slowest - 1, microbatches - 1)
    sending = own.sending / 2
    first = max(0.0, behind - ahead * (own.forward + sending))
    last = max(0.0, behind - ahead * (own.backward + sending))
    return before + (first + last if ahead else behind)
