"""What every place on a pipeline does, in order: the schedule of a plan, written out without running it."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from danlu.cost.schedule import actions_of
from danlu.parallel.pipeline import LOOPED, SINGLE, compute_steps, rank_stages
from danlu.spec.plan import Plan


def schedule_actions(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """For every place on the pipeline its actions in order; `F0.3` is the forward of stage 0 for microbatch 3.

    `B` is a whole backward, `I` and `W` are its halves for inputs and for weights. Empty without a pipeline.
    """
    if plan.degrees.pp == 1:
        return ()
    if plan.pipeline.schedule in SINGLE:
        # What torch's 1F1B schedule says of itself is off by one for the last stage (PyTorch 2.13).
        return actions_of(plan.pipeline.schedule, places=plan.degrees.pp, microbatches=plan.microbatches)
    return _looped(plan)


@dataclass
class _Outline:
    """As much of a pipeline stage as a schedule asks for when it is made."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int
    is_last: bool
    submod: nn.Module = field(default_factory=nn.Identity)
    stage_index_to_group_rank: dict[int, int] = field(default_factory=dict)


def _looped(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """The schedules of several stages a rank know the order of all ranks."""
    outlines: list[Any] = [
        _Outline(stage, plan.stages, plan.degrees.pp, group_rank=0, is_last=stage == plan.stages - 1)
        for stage in rank_stages(plan, 0)
    ]
    schedule: Any = LOOPED[plan.pipeline.schedule](outlines, plan.microbatches, loss_fn=lambda *_: None)
    return tuple(tuple(f"{step.kind}{step.stage}.{step.microbatch}" for step in row) for row in compute_steps(schedule))
