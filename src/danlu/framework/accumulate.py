"""Forward and backward without a pipeline: microbatches one after the other."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from danlu.parallel.shard import reduce_replicas


class Accumulation:
    """Gradients added up over microbatches; replicas are summed once, with the last."""

    def __init__(self, part: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], microbatches: int) -> None:
        self.part = part
        self.loss = loss
        self.microbatches = microbatches

    def __call__(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Forward and backward of all microbatches; the sum of their losses."""
        total = torch.zeros((), device=tokens_BS.device)
        pieces = list(zip(tokens_BS.chunk(self.microbatches), targets_BS.chunk(self.microbatches), strict=True))
        for number, (tokens, targets) in enumerate(pieces, start=1):
            reduce_replicas(self.part, number == len(pieces))
            loss = self.loss(self.part(tokens), targets)
            loss.backward()
            total += loss.detach()
        return total
