"""Forward and backward without a pipeline, one microbatch after another."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from danlu.parallel.batch import Batch
from danlu.parallel.fsdp import set_replica_all_reduce


class GradientAccumulation:
    """Accumulates gradients over microbatches; replicas are summed once, with the last."""

    def __init__(self, stage_module: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], microbatches: int) -> None:
        self.stage_module = stage_module
        self.loss = loss
        self.microbatches = microbatches

    def __call__(self, batch: Batch) -> Tensor:
        """Forward and backward of all microbatches; the sum of their losses."""
        total = torch.zeros((), device=batch.tokens.device)
        chunks = (tensor.chunk(self.microbatches) for tensor in (batch.tokens, batch.targets))
        pieces = list(zip(*chunks, strict=True))
        for number, (tokens, targets) in enumerate(pieces, start=1):
            set_replica_all_reduce(self.stage_module, number == len(pieces))
            loss = self.loss(self.stage_module(tokens), targets)
            loss.backward()
            total += loss.detach()
        return total
