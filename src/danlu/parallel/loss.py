"""Cross-entropy of logits that may be sharded by the vocabulary, and need not be in memory all at once."""

from itertools import pairwise
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


def linear_cross_entropy_sum(
    x_BSD: Tensor, weight_VD: Tensor, targets_BS: Tensor, group: ProcessGroup | None, chunks: int
) -> Tensor:
    """The same of the logits `x_BSD @ weight_VD.T`, of which one of `chunks` parts of the vocabulary is in memory.

    The backward pass computes them again. With a group, `weight_VD` is a rank's shard of V.
    """
    return _LinearCrossEntropySum.apply(x_BSD.flatten(0, 1), weight_VD, targets_BS.flatten(), group, chunks)


def _over_ranks(
    highest_N: Tensor, sums_N: Tensor, target_N: Tensor, group: ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """What `softmax_sums` found in the parts of all ranks."""
    if group is None:
        return highest_N, sums_N, target_N
    mine_N = highest_N.clone()
    dist.all_reduce(highest_N, dist.ReduceOp.MAX, group=group)
    sums_2N = torch.stack((sums_N * (mine_N - highest_N).exp(), target_N))
    dist.all_reduce(sums_2N, group=group)
    return highest_N, sums_2N[0], sums_2N[1]


def _sum(highest_N: Tensor, sums_N: Tensor, target_N: Tensor, targets_N: Tensor, vocabulary: int) -> Tensor:
    """The sum of the cross-entropy at every position."""
    loss_N = (sums_N.log() + (highest_N - target_N)).masked_fill(targets_N == IGNORE_INDEX, 0.0)
    return loss_N.masked_fill(_unknown(targets_N, vocabulary), torch.nan).sum()


def _factors(gradient: Tensor, targets_N: Tensor, sums_N: Tensor) -> Tensor:
    """What the gradient of every position's logits is multiplied by."""
    return gradient.expand_as(sums_N).masked_fill(targets_N == IGNORE_INDEX, 0.0)


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
        highest_N, sums_N, target_N = _over_ranks(*softmax_sums(logits_NV, targets_N, ctx.first), group)
        ctx.save_for_backward(logits_NV, targets_N, highest_N, sums_N)
        vocabulary = logits_NV.shape[1] * (1 if group is None else group.size())
        return _sum(highest_N, sums_N, target_N, targets_N, vocabulary)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits_NV, targets_N, highest_N, sums_N = ctx.saved_tensors
        factors_N = _factors(grads[0], targets_N, sums_N)
        return cross_entropy_backward(logits_NV, targets_N, highest_N, sums_N, factors_N, ctx.first), None, None


class _LinearCrossEntropySum(torch.autograd.Function):
    """Parts of the vocabulary on one rank are what its shards are on several: highest logits and sums of each, merged.

    A part of the matrix has its whole gradient from its own logits, rounded once; that of the hidden states is a sum
    over parts, in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, group: ProcessGroup | None, chunks: int
    ) -> Tensor:
        first = 0 if group is None else group.rank() * len(weight_VD)
        ctx.parts = _parts(len(weight_VD), chunks, first)
        found: tuple[Tensor, Tensor, Tensor] | None = None
        for rows, begin in ctx.parts:
            part = softmax_sums(x_ND @ weight_VD[rows].T, targets_N, begin)
            found = part if found is None else _merged(found, part)
        assert found is not None
        highest_N, sums_N, target_N = _over_ranks(*found, group)
        ctx.save_for_backward(x_ND, weight_VD, targets_N, highest_N, sums_N)
        vocabulary = len(weight_VD) * (1 if group is None else group.size())
        return _sum(highest_N, sums_N, target_N, targets_N, vocabulary)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x_ND, weight_VD, targets_N, highest_N, sums_N = ctx.saved_tensors
        factors_N = _factors(grads[0], targets_N, sums_N)
        x_gradient_ND = torch.zeros_like(x_ND, dtype=torch.promote_types(x_ND.dtype, torch.float32))
        weight_gradient_VD = torch.empty_like(weight_VD)
        for rows, begin in ctx.parts:
            logits_NV = x_ND @ weight_VD[rows].T
            gradient_NV = cross_entropy_backward(logits_NV, targets_N, highest_N, sums_N, factors_N, begin)
            del logits_NV
            weight_gradient_VD[rows] = gradient_NV.T @ x_ND
            x_gradient_ND += gradient_NV @ weight_VD[rows]
            del gradient_NV  # before the next part's logits
        return x_gradient_ND.type_as(x_ND), weight_gradient_VD, None, None, None


def _parts(rows: int, chunks: int, first: int) -> list[tuple[slice, int]]:
    """Rows of a rank's matrix, as even as possible, and the token of each part's first row."""
    ends = [rows * part // chunks for part in range(chunks + 1)]
    return [(slice(start, end), first + start) for start, end in pairwise(ends) if end > start]


def _merged(one: tuple[Tensor, Tensor, Tensor], other: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """What `softmax_sums` finds in two parts together; a part of nothing but -inf adds nothing."""
    highest_N = torch.maximum(one[0], other[0])
    base_N = highest_N.masked_fill(highest_N == -torch.inf, 0.0)
    sums_N = one[1] * (one[0] - base_N).exp() + other[1] * (other[0] - base_N).exp()
    return highest_N, sums_N, one[2] + other[2]
