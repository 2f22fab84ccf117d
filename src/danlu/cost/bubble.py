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
    hops: float = 0.0
    """From this rank to the next and back: what a microbatch is on its way while nothing hides it."""

    @property
    def slot(self) -> float:
        """Both passes with their transfers: what a rank takes for one microbatch."""
        return self.forward + self.backward + self.sending

    @property
    def path(self) -> float:
        """Both passes and the way to the next rank: what a microbatch takes through the rank."""
        return self.forward + self.backward + self.hops


def pipeline_time(stages: Sequence[StageTime], microbatches: int, schedule: Schedule, stages_per_rank: int) -> float:
    """Seconds from the first forward to the last backward over the ranks of one pipeline."""
    slowest = max(range(len(stages)), key=lambda rank: stages[rank].slot)
    steady = microbatches * stages[slowest].slot
    if len(stages) == 1:
        return steady
    if schedule == "zero-bubble":
        waits = [max(0.0, stage.path - 2 * stage.weights) for stage in stages]
        return steady + (sum(waits) - waits[slowest]) / stages_per_rank
    if schedule == "zbv":
        # Forward, backward for inputs and for weights fill each other's waits as far as they are equal.
        waits = [abs(stage.backward - stage.weights - stage.forward) / 2 for stage in stages]
        return steady + sum(waits) - waits[slowest]
    return steady + _waits(stages, slowest, microbatches) / stages_per_rank


def _waits(stages: Sequence[StageTime], slowest: int, microbatches: int) -> float:
    """How long the slowest rank waits, for 1F1B.

    For the passes of the ranks before it, first and last; and twice for the ranks behind it: until its first backward,
    while it goes on with forwards, and after its last forward, while it goes on with backwards.
    """
    own = stages[slowest]
    before = sum(stage.path for stage in stages[:slowest])
    behind = sum(stage.path for stage in stages[slowest + 1 :])
    ahead = min(len(stages) - slowest - 1, microbatches - 1)
    sending = own.sending / 2
    first = max(0.0, behind - ahead * (own.forward + sending))
    last = max(0.0, behind - ahead * (own.backward + sending))
    return before + (first + last if ahead else behind)
