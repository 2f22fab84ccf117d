"""Cross-entropy of logits in their own dtype: no fp32 copy of them, and no softmax kept.

Shapes: N positions, V logits of each, which may be one part of the vocabulary. What it costs is in
`ops/embedding_head.py`. Two operators, between which ranks that hold parts of the vocabulary add up
(`parallel/loss.py`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from danlu.ops.operators import cpu
from danlu.ops.operators.operator import Implementation, Operator, define_operator, precise

_AT_ONCE = 1 << 24
"""Logits that are in fp32 at once where torch computes."""


def reference(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """The cross-entropy at every position, in fp32 or, of fp64, in fp64."""
    logits_NV = logits_NV.to(precise(logits_NV.dtype))
    return logits_NV.logsumexp(1) - logits_NV.gather(1, targets_N[:, None])[:, 0]


CROSS_ENTROPY = Operator(
    "cross_entropy",
    reference,
    {torch.float64: 2.0**-20, torch.float32: 2.0**-20, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7},
    settings=((0,), (0,)),
)


def _forward(logits_NV: Tensor, targets_N: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """The highest logit of every row, the sum of exp(logit - highest), and the logit at its target, all in fp32.

    The columns are those from `first` on; a target that is not among them has 0. A sum of nothing but -inf is 0: other
    parts of the vocabulary may have more.
    """
    return CROSS_ENTROPY.implementation(logits_NV).forward(logits_NV.contiguous(), targets_N.contiguous(), first)


def _backward(
    logits_NV: Tensor, targets_N: Tensor, highest_N: Tensor, sums_N: Tensor, factors_N: Tensor, first: int
) -> Tensor:
    """Softmax minus one at the target, times every row's factor, in the dtype of the logits; 0 where that is 0.

    `highest_N` and `sums_N` are those of `softmax_sums`, over the whole vocabulary.
    """
    rows = (each.contiguous() for each in (targets_N, highest_N, sums_N, factors_N))
    return CROSS_ENTROPY.implementation(logits_NV).backward(logits_NV.contiguous(), *rows, first)


def _forward_fake(logits_NV: Tensor, targets_N: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    highest_N, sums_N, target_N = (logits_NV.new_empty(len(logits_NV), dtype=torch.float32) for _ in range(3))
    return highest_N, sums_N, target_N


def _backward_fake(
    logits_NV: Tensor, targets_N: Tensor, highest_N: Tensor, sums_N: Tensor, factors_N: Tensor, first: int
) -> Tensor:
    return logits_NV.new_empty(logits_NV.shape)


softmax_sums: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]] = define_operator(
    "softmax_sums", "(Tensor logits, Tensor targets, int first) -> (Tensor, Tensor, Tensor)", _forward, _forward_fake
)
cross_entropy_backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor] = define_operator(
    "cross_entropy_backward",
    "(Tensor logits, Tensor targets, Tensor highest, Tensor sums, Tensor factors, int first) -> Tensor",
    _backward,
    _backward_fake,
)


def _torch_forward(logits_NV: Tensor, targets_N: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    parts = []
    for rows in _chunks(logits_NV):
        wide_NV = logits_NV[rows].float()
        highest_N = wide_NV.amax(1)
        column_N, held_N = _held(targets_N[rows], first, wide_NV.shape[1])
        target_N = torch.where(held_N, wide_NV.gather(1, column_N[:, None])[:, 0], 0.0)
        base_N = highest_N.masked_fill(highest_N == -torch.inf, 0.0)
        parts.append((highest_N, (wide_NV - base_N[:, None]).exp_().sum(1), target_N))
    highest_N, sums_N, target_N = (torch.cat(each) for each in zip(*parts, strict=True))
    return highest_N, sums_N, target_N


def _torch_backward(
    logits_NV: Tensor, targets_N: Tensor, highest_N: Tensor, sums_N: Tensor, factors_N: Tensor, first: int
) -> Tensor:
    gradient_NV = torch.empty_like(logits_NV)
    for rows in _chunks(logits_NV):
        wide_NV = (logits_NV[rows].float() - highest_N[rows, None]).exp_().div_(sums_N[rows, None])
        column_N, held_N = _held(targets_N[rows], first, wide_NV.shape[1])
        wide_NV.scatter_add_(1, column_N[:, None], -held_N[:, None].float())
        wide_NV.mul_(factors_N[rows, None]).masked_fill_(factors_N[rows, None] == 0, 0.0)
        gradient_NV[rows] = wide_NV
    return gradient_NV


def _chunks(logits_NV: Tensor) -> list[slice]:
    """Rows of which so many are in fp32 at once that it is little memory."""
    each = max(1, _AT_ONCE // max(1, logits_NV.shape[1]))
    return [slice(first, first + each) for first in range(0, max(1, len(logits_NV)), each)]


def _held(targets_N: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """The column of every target, and whether it is one of this part of the vocabulary."""
    column_N = targets_N - first
    return column_N.clamp(0, width - 1), (column_N >= 0) & (column_N < width)


def _native_forward(logits_NV: Tensor, targets_N: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    highest_N, sums_N, target_N = (logits_NV.new_empty(len(logits_NV), dtype=torch.float32) for _ in range(3))
    cpu.call("softmax_sums", logits_NV, logits_NV, targets_N, highest_N, sums_N, target_N, *logits_NV.shape, first)
    return highest_N, sums_N, target_N


def _native_backward(
    logits_NV: Tensor, targets_N: Tensor, highest_N: Tensor, sums_N: Tensor, factors_N: Tensor, first: int
) -> Tensor:
    gradient_NV = torch.empty_like(logits_NV)
    tensors = logits_NV, targets_N, highest_N, sums_N, factors_N, gradient_NV
    cpu.call("cross_entropy_backward", logits_NV, *tensors, *logits_NV.shape, first)
    return gradient_NV


CROSS_ENTROPY.implementations += [
    Implementation("torch", _torch_forward, _torch_backward, "in operators of torch, some rows at a time"),
    cpu.native(_native_forward, _native_backward),
]
