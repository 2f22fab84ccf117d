"""Forward and backward without a pipeline, one microbatch after another."""

import torch
from torch import Tensor, nn

from danlu.parallel.batch import Batch
from danlu.parallel.fsdp import defer_reduction, set_replica_all_reduce
from danlu.parallel.loss import MeanLoss
from danlu.spec.plan import Plan


class GradientAccumulation:
    """Accumulates gradients over microbatches; replicas are summed with the last, and shards if the plan says so."""

    def __init__(self, stage_module: nn.Module, loss: MeanLoss, microbatches: int, plan: Plan) -> None:
        """So many `microbatches`, which need not be the plan's."""
        self.stage_module = stage_module
        self.loss = loss
        self.microbatches = microbatches
        self.plan = plan

    def __call__(self, batch: Batch, counted: Tensor | None = None) -> Tensor:
        """Forward and backward of all microbatches; the sum of their losses."""
        total = torch.zeros((), device=batch.tokens.device)
        pieces = batch.microbatches(self.microbatches)
        for number, piece in enumerate(pieces, start=1):
            is_last = number == len(pieces)
            set_replica_all_reduce(self.stage_module, is_last)
            if self.plan.reduces_once_per_step:
                defer_reduction(self.stage_module, not is_last, not self.plan.resolved_reshard_after_forward)
            inputs = piece.model_inputs
            if self.plan.loss_chunks > 1:  # the head itself makes the loss out of some logits at a time
                inputs = inputs | {"targets": piece.targets}
            loss = self.loss(self.stage_module(piece.tokens, **inputs), piece.targets, counted)
            loss.backward()
            total += loss.detach()
        return total
