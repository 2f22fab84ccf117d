"""Pipeline parallelism on the schedules of torch.distributed.pipelining."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from danlu.parallel.arrivals import Step, arrivals
from danlu.parallel.stage import Sends, Stage
from danlu.spec.plan import Plan, Schedule

SINGLE: dict[Schedule, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
LOOPED: dict[Schedule, type[PipelineScheduleMulti]] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}

STEP_KINDS = ("F", "B", "I", "W")
"""Actions of a schedule that are passes, by torch's letters: forward, backward, and its halves."""


def rank_stages(plan: Plan, place: int) -> list[int]:
    """The stages that the rank at `place` on the pipeline holds: round and round, or down and up again for `zbv`."""
    pp, per_rank = plan.degrees.pp, plan.pipeline.stages_per_rank
    if plan.pipeline.schedule == "zbv":
        return [place, 2 * pp - 1 - place]
    return [place + turn * pp for turn in range(per_rank)]


class Pipeline:
    """One step of the schedule over this rank's stages."""

    def __init__(
        self,
        plan: Plan,
        parts: Sequence[nn.Module],
        stages: Sequence[int],
        streams: Callable[[int], tuple[Tensor, Tensor]],
        loss: Callable[[Tensor, Tensor], Tensor],
        device: torch.device,
        group: ProcessGroup,
    ) -> None:
        """`streams(stage)` gives meta tensors like a stage's input and output: ranks need not ask each other."""
        self.stages = [
            Stage(part, stage, plan.stages, device, *streams(stage), group=group)
            for part, stage in zip(parts, stages, strict=True)
        ]
        self.first = 0 in stages
        self.last = plan.stages - 1 in stages
        self.sends: Sends | None = None
        name = plan.pipeline.schedule
        # Gradients are not averaged over microbatches: the loss is already divided by the tokens of the global batch.
        if name in SINGLE:
            self.schedule: PipelineScheduleSingle | PipelineScheduleMulti = SINGLE[name](
                self.stages[0], plan.microbatches, loss_fn=loss, scale_grads=False
            )
        else:
            self.schedule = LOOPED[name](list(self.stages), plan.microbatches, loss_fn=loss, scale_grads=False)
            self.sends = Sends(arrivals(compute_steps(self.schedule), group.rank()))
            for stage in self.stages:
                stage.sends = self.sends

    def __call__(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Forward and backward of all microbatches; the sum of their losses, zero where the last stage is elsewhere."""
        losses: list[Tensor] = []
        inputs = (tokens_BS,) if self.first else ()
        if self.last:
            self.schedule.step(*inputs, target=targets_BS, losses=losses, return_outputs=False)
        else:
            self.schedule.step(*inputs, return_outputs=False)
        if self.sends is not None:
            self.sends.finish()
        return torch.stack(losses).sum().detach() if self.last else torch.zeros((), device=tokens_BS.device)


def compute_steps(schedule: PipelineScheduleMulti) -> list[list[Step]]:
    """The passes of every rank in the order a looped schedule takes them, without what it does in between."""
    order = schedule.pipeline_order_with_comms  # type: ignore[attr-defined]
    return [
        [
            Step(action.computation_type.value, action.stage_index, action.microbatch_index)
            for action in order[rank]
            if action.computation_type.value in STEP_KINDS
        ]
        for rank in range(len(order))
    ]
