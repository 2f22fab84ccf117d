"""Cross-entropy of logits that may be sharded by the vocabulary."""

from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from danlu.parallel.batch import IGNORE_INDEX


class MeanLoss(Protocol):
    """This rank's share of the mean loss over the global batch."""

    def __call__(self, logits_BSV: Tensor, targets_BS: Tensor, counted: Tensor | None) -> Tensor:
        """The sum over these targets, divided by the targets that are `counted` globally; None: all of them."""
        ...


def cross_entropy_sum(
    logits_BSV: Tensor, targets_BS: Tensor, group: ProcessGroup | None, masked: bool = False
) -> Tensor:
    """Sum of the cross-entropy over all positions, in fp32; with a group, `logits_BSV` is a rank's shard of V.

    If targets are `masked`, those that are `IGNORE_INDEX` add nothing.
    """
    logits, targets = logits_BSV.flatten(0, 1).float(), targets_BS.flatten()
    if group is None:
        return F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORE_INDEX)
    return _VocabParallelCrossEntropy.apply(logits, targets, group, masked)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Two small all-reduces instead of gathering the logits, the largest activation of a model.

    torch's `loss_parallel` does the same in a context manager that must be active during backward,
    which a pipeline schedule runs elsewhere.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, group: ProcessGroup, masked: bool) -> Tensor:
        width = logits_NV.shape[1]
        top_N = logits_NV.amax(1)
        dist.all_reduce(top_N, dist.ReduceOp.MAX, group=group)
        exp_NV = (logits_NV - top_N[:, None]).exp_()
        local_N = targets_N - group.rank() * width
        held_N = (local_N >= 0) & (local_N < width)
        local_N = local_N.clamp(0, width - 1)
        target_N = torch.where(held_N, logits_NV.gather(1, local_N[:, None])[:, 0] - top_N, 0.0)
        sums_2N = torch.stack((exp_NV.sum(1), target_N))
        dist.all_reduce(sums_2N, group=group)
        total_N, target_N = sums_2N
        loss_N = total_N.log() - target_N
        if masked:
            ignored_N = targets_N == IGNORE_INDEX  # held by no rank
            loss_N = loss_N.masked_fill(ignored_N, 0.0)
            total_N = total_N.masked_fill(ignored_N, torch.inf)  # a softmax of zeros
        # The gradient overwrites the exponentials: the softmax, minus one at the target.
        gradient_NV = exp_NV.div_(total_N[:, None])
        gradient_NV.scatter_add_(1, local_N[:, None], -held_N[:, None].to(gradient_NV.dtype))
        ctx.save_for_backward(gradient_NV)
        return loss_N.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient_NV,) = ctx.saved_tensors
        return gradient_NV * grads[0], None, None, None
