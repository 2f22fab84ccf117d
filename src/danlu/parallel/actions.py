"""What every place on a pipeline does, in order: the schedule of a plan, written out without running it."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from danlu.parallel.pipeline import LOOPED, SINGLE, rank_stages
from danlu.spec.plan import Plan

_LETTERS = {"F", "B", "I", "W"}


def schedule_actions(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """For every place on the pipeline its actions in order; `F0.3` is the forward of stage 0 for microbatch 3.

    `B` is a whole backward, `I` and `W` are its halves for inputs and for weights. Empty without a pipeline.
    """
    if plan.degrees.pp == 1:
        return ()
    if plan.pipeline.schedule in SINGLE:
        return tuple(_single(plan, place) for place in range(plan.degrees.pp))
    return _looped(plan)


def _single(plan: Plan, place: int) -> tuple[str, ...]:
    """The schedules of one stage a rank, in the order that torch runs them.

    (What its 1F1B schedule says of itself is off by one for the last stage in PyTorch 2.13.)
    """
    microbatches, pp = plan.microbatches, plan.degrees.pp
    ahead = microbatches if plan.pipeline.schedule == "gpipe" else min(microbatches, pp - place)
    actions = [f"F{place}.{microbatch}" for microbatch in range(ahead)]
    for microbatch in range(microbatches):
        actions.append(f"B{place}.{microbatch}")
        if (following := ahead + microbatch) < microbatches:
            actions.append(f"F{place}.{following}")
    return tuple(actions)


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
    return tuple(
        tuple(
            f"{action.computation_type.value}{action.stage_index}.{action.microbatch_index}"
            for action in schedule.pipeline_order_with_comms[place]
            if action.computation_type.value in _LETTERS
        )
        for place in range(plan.degrees.pp)
    )
