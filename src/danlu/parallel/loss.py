"""Cross-entropy of logits that may be sharded by the vocabulary."""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from danlu.ops.operators.cross_entropy import cross_entropy_backward, softmax_sums
from danlu.parallel.batch import IGNORE_INDEX
from danlu.torch_compat import is_fake


class MeanLoss(Protocol):
    """This rank's share of the mean loss over the global batch."""

    def __call__(self, logits_BSV: Tensor, targets_BS: Tensor, counted: Tensor | None) -> Tensor:
        """The sum over these targets, divided by the targets that are `counted` globally; None: all of them."""
        ...


def cross_entropy_sum(logits_BSV: Tensor, targets_BS: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum of the cross-entropy over all positions, in fp32; with a group, `logits_BSV` is a rank's shard of V.

    Targets that are `IGNORE_INDEX` add nothing.
    """
    return _CrossEntropySum.apply(logits_BSV.flatten(0, 1), targets_BS.flatten(), group)


def _unknown(targets_N: Tensor, vocabulary: int) -> Tensor:
    """Where targets are no tokens: an error on a CPU; elsewhere, without waiting for the device, a loss of NaN."""
    unknown_N = ((targets_N < 0) | (targets_N >= vocabulary)) & (targets_N != IGNORE_INDEX)
    if targets_N.device.type == "cpu" and not is_fake(targets_N) and unknown_N.any():
        raise IndexError(
            f"target {int(targets_N[unknown_N][0])} is out of bounds: the vocabulary has {vocabulary} tokens; were the "
            "data made with another tokenizer?"
        )
    return unknown_N


class _CrossEntropySum(torch.autograd.Function):
    """Of sharded logits by two small all-reduces instead of gathering them, the largest activation of a model.

    torch's `loss_parallel` does the same in a context manager that must be active during backward,
    which a pipeline schedule runs elsewhere.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.first = 0 if group is None else group.rank() * logits_NV.shape[1]
        highest_N, sums_N, target_N = softmax_sums(logits_NV, targets_N, ctx.first)
        if group is not None:
            mine_N = highest_N.clone()
            dist.all_reduce(highest_N, dist.ReduceOp.MAX, group=group)
            sums_2N = torch.stack((sums_N * (mine_N - highest_N).exp(), target_N))
            dist.all_reduce(sums_2N, group=group)
            sums_N, target_N = sums_2N
        ctx.save_for_backward(logits_NV, targets_N, highest_N, sums_N)
        loss_N = (sums_N.log() + (highest_N - target_N)).masked_fill(targets_N == IGNORE_INDEX, 0.0)
        unknown_N = _unknown(targets_N, logits_NV.shape[1] * (1 if group is None else group.size()))
        return loss_N.masked_fill(unknown_N, torch.nan).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits_NV, targets_N, highest_N, sums_N = ctx.saved_tensors
        factors_N = grads[0].expand_as(sums_N).masked_fill(targets_N == IGNORE_INDEX, 0.0)
        return cross_entropy_backward(logits_NV, targets_N, highest_N, sums_N, factors_N, ctx.first), None, None
