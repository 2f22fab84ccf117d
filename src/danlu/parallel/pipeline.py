"""Pipeline parallelism on the schedules of torch.distributed.pipelining."""

from collections.abc import Callable, Sequence
from typing import Any

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

from danlu.parallel.batch import Batch
from danlu.parallel.loss import MeanLoss
from danlu.parallel.pipeline_stage import LazyBufferStage, PendingSends
from danlu.parallel.send_completion import MicrobatchPass, completed_sends
from danlu.spec.plan import PipelineSchedule, Plan
from danlu.torch_compat.pipelining import action_kind, discard_outputs, looped_schedule

SINGLE_STAGE_SCHEDULES: dict[PipelineSchedule, type[PipelineScheduleSingle]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
}
MULTI_STAGE_SCHEDULES: dict[PipelineSchedule, type[PipelineScheduleMulti]] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}

PASS_TYPES = ("F", "B", "I", "W")
"""Actions of a schedule that are passes, by torch's letters: forward, backward, and the halves of backward."""


class PipelineRunner:
    """One step of the schedule over this rank's stages."""

    def __init__(
        self,
        plan: Plan,
        stage_modules: Sequence[nn.Module],
        stages: Sequence[int],
        stage_io_meta: Callable[[int], tuple[Tensor, Tensor]],
        loss: MeanLoss,
        device: torch.device,
        group: ProcessGroup,
    ) -> None:
        """`stage_io_meta(stage)` gives meta tensors of a stage's input and output: ranks need not exchange shapes."""
        self.stages = [
            LazyBufferStage(stage_module, stage, plan.num_stages, device, *stage_io_meta(stage), group=group)
            for stage_module, stage in zip(stage_modules, stages, strict=True)
        ]
        self.first = 0 in stages
        self.last = plan.num_stages - 1 in stages
        self.sends: PendingSends | None = None
        self.loss = loss
        self.counted: Tensor | None = None
        name = plan.pipeline.schedule
        # Gradients are not averaged over microbatches: the loss is already divided by the tokens of the global batch.
        if name in SINGLE_STAGE_SCHEDULES:
            self.schedule: PipelineScheduleSingle | PipelineScheduleMulti = SINGLE_STAGE_SCHEDULES[name](
                self.stages[0], plan.microbatches, loss_fn=self._mean_loss, scale_grads=False
            )
        else:
            looped = looped_schedule(MULTI_STAGE_SCHEDULES[name], list(self.stages), plan.microbatches, self._mean_loss)
            self.sends = PendingSends(completed_sends(compute_passes(looped), group.rank()))
            self.schedule = looped
            for stage in self.stages:
                stage.sends = self.sends
        self._step_options = discard_outputs(self.schedule)

    def __call__(self, batch: Batch, counted: Tensor | None = None) -> Tensor:
        """Forward and backward of all microbatches; the sum of their losses, zero without the last stage."""
        losses: list[Tensor] = []
        inputs = (batch.tokens,) if self.first else ()
        # Every stage is given its microbatches' positions by its own rank: nothing but hidden states is sent.
        options = self._step_options | batch.model_inputs
        self.counted = counted
        if self.last:
            self.schedule.step(*inputs, target=batch.targets, losses=losses, **options)
        else:
            self.schedule.step(*inputs, **options)
        if self.sends is not None:
            self.sends.wait_all()
        return torch.stack(losses).sum().detach() if self.last else torch.zeros((), device=batch.tokens.device)

    def _mean_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.loss(logits, targets, self.counted)


def compute_passes(schedule: Any) -> list[list[MicrobatchPass]]:
    """The passes of every rank in the order of a looped schedule, without its other actions."""
    order = schedule.pipeline_order_with_comms
    return [
        [
            MicrobatchPass(action_kind(action), action.stage_index, action.microbatch_index)
            for action in order[rank]
            if action_kind(action) in PASS_TYPES
        ]
        for rank in range(len(order))
    ]
