"""Forward and backward without a pipeline, one microbatch after another."""

import torch
from torch import Tensor, nn

from danlu.parallel.batch import Batch
from danlu.parallel.fsdp import set_replica_all_reduce
from danlu.parallel.loss import MeanLoss


class GradientAccumulation:
    """Accumulates gradients over microbatches; replicas are summed once, with the last."""

    def __init__(self, stage_module: nn.Module, loss: MeanLoss, microbatches: int) -> None:
        self.stage_module = stage_module
        self.loss = loss
        self.microbatches = microbatches

    def __call__(self, batch: Batch, counted: Tensor | None = None) -> Tensor:
        """Forward and backward of all microbatches; the sum of their losses."""
        total = torch.zeros((), device=batch.tokens.device)
        pieces = batch.microbatches(self.microbatches)
        for number, piece in enumerate(pieces, start=1):
            set_replica_all_reduce(self.stage_module, number == len(pieces))
            loss = self.loss(self.stage_module(piece.tokens, **piece.model_inputs), piece.targets, counted)
            loss.backward()
            total += loss.detach()
        return total
