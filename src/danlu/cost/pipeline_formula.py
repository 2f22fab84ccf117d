"""Time of a pipeline step in closed form, for searches; `simulate` computes it from the actions.

1F1B (Narayanan et al., PipeDream-Flush; SC 2021): the slowest stage processes all microbatches, and the others' passes
of one microbatch come before and after. Interleaved: the same with passes 1/v as long (SC 2021, section 2.2).
Zero-bubble: gradients of weights fill the wait (Qi et al., "Zero bubble pipeline parallelism", 2023).
"""

from collections.abc import Sequence
from typing import NamedTuple

from danlu.spec.plan import PipelineSchedule


class StageTime(NamedTuple):
    """One rank's passes of one microbatch, all its stages together."""

    forward: float
    backward: float
    weight_grad: float
    """Of `backward`, the deferrable gradients of weights."""
    p2p: float = 0.0
    """Exposed transfers of one microbatch, which keep the rank busy."""
    p2p_next: float = 0.0
    """Transfer of a microbatch to the next rank, and of its gradient back, without overlap."""
    p2p_previous: float = 0.0
    """The same between this rank and the previous one."""

    @property
    def per_microbatch(self) -> float:
        """Both passes with their exposed transfers."""
        return self.compute + self.p2p

    @property
    def compute(self) -> float:
        """Both passes."""
        return self.forward + self.backward


def pipeline_time(
    stages: Sequence[StageTime], microbatches: int, schedule: PipelineSchedule, stages_per_rank: int
) -> float:
    """Seconds from the first forward to the last backward over the ranks of one pipeline."""
    slowest = max(range(len(stages)), key=lambda rank: stages[rank].per_microbatch)
    steady = microbatches * stages[slowest].per_microbatch
    if len(stages) == 1:
        return steady
    if schedule == "zero-bubble":
        paths = _microbatch_paths(stages, slowest)
        waits = [max(0.0, path - 2 * stage.weight_grad) for path, stage in zip(paths, stages, strict=True)]
        return steady + (sum(waits) - waits[slowest]) / stages_per_rank
    if schedule == "zbv":
        # Forward, backward for inputs and for weights fill each other's waits if they are equal.
        waits = [abs(stage.backward - stage.weight_grad - stage.forward) / 2 for stage in stages]
        return steady + sum(waits) - waits[slowest]
    return steady + _wait_1f1b(stages, slowest, microbatches) / stages_per_rank


def _microbatch_paths(stages: Sequence[StageTime], slowest: int) -> list[float]:
    """Time of a microbatch on every rank, with its transfers from there to the slowest one and back."""
    return [
        stage.compute + (stage.p2p_next if rank < slowest else stage.p2p_previous) for rank, stage in enumerate(stages)
    ]


def _wait_1f1b(stages: Sequence[StageTime], slowest: int, microbatches: int) -> float:
    """How long the slowest rank waits, for 1F1B.

    For the passes of the ranks before it, first and last; and twice for the ranks after it: until its first backward,
    while it continues with forwards, and after its last forward, while it continues with backwards.
    """
    own, paths = stages[slowest], _microbatch_paths(stages, slowest)
    before, behind = sum(paths[:slowest]), sum(paths[slowest + 1 :])
    ahead = min(len(stages) - slowest - 1, microbatches - 1)
    sending = own.p2p / 2
    first = max(0.0, behind - ahead * (own.forward + sending))
    last = max(0.0, behind - ahead * (own.backward + sending))
    return before + (first + last if ahead else behind)
