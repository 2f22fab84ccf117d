"""The actions of every pipeline rank, in order: the schedule of a plan, without running it."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from danlu.cost.pipeline_schedules import pipeline_actions
from danlu.parallel.pipeline import MULTI_STAGE_SCHEDULES, SINGLE_STAGE_SCHEDULES, compute_passes
from danlu.spec.plan import Plan
from danlu.torch_compat.pipelining import looped_schedule


def schedule_actions(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """The actions of every pipeline rank in order; `F0.3` is the forward of stage 0 for microbatch 3.

    `B` is a full backward, `I` and `W` are its halves for inputs and for weights. Empty without a pipeline.
    """
    if plan.degrees.pp == 1:
        return ()
    if plan.pipeline.schedule in SINGLE_STAGE_SCHEDULES:
        # The action list of torch's 1F1B schedule is off by one for the last stage (PyTorch 2.13).
        return pipeline_actions(plan.pipeline.schedule, pp_ranks=plan.degrees.pp, microbatches=plan.microbatches)
    return _multi_stage_actions(plan)


@dataclass
class _StageStub:
    """The attributes of a pipeline stage that a schedule's constructor reads."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int
    is_last: bool
    submod: nn.Module = field(default_factory=nn.Identity)
    stage_index_to_group_rank: dict[int, int] = field(default_factory=dict)


def _multi_stage_actions(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Schedules with several stages per rank know the order of all ranks."""
    stubs: list[Any] = [
        _StageStub(stage, plan.num_stages, plan.degrees.pp, group_rank=0, is_last=stage == plan.num_stages - 1)
        for stage in plan.stages_of_rank(0)
    ]
    kind = MULTI_STAGE_SCHEDULES[plan.pipeline.schedule]
    schedule = looped_schedule(kind, stubs, plan.microbatches, lambda *_: None)
    return tuple(
        tuple(f"{step.kind}{step.stage}.{step.microbatch}" for step in row) for row in compute_passes(schedule)
    )
