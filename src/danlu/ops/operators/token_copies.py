"""Copies of tokens for their experts: one a chosen expert, sorted by expert, and back in the tokens' order.

Shapes: T tokens, D width of the hidden states, K experts of a token, N token copies (T × K).
"""

from typing import Any

import torch
from torch import Tensor


def sort_by_expert(chosen_TK: Tensor) -> tuple[Tensor, Tensor]:
    """What sorts a copy of every token for each of its experts, and what undoes it."""
    order_N = chosen_TK.flatten().argsort(stable=True)
    return order_N, inverse(order_N)


def inverse(order_N: Tensor) -> Tensor:
    """What undoes an order."""
    return torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))


def balanced_counts(copies: int, experts: int) -> list[int]:
    """Copies for every expert, as even as possible."""
    even_count, rest = divmod(copies, experts)
    return [even_count + (expert < rest) for expert in range(experts)]


class CopyTokens(torch.autograd.Function):
    """A copy of every token for each of its experts, sorted by expert.

    The gradient sums a token's copies; that of indexing would add them one by one, as if any might meet.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_N: Tensor, back_N: Tensor, top_k: int) -> Tensor:
        """`order_N` sorts copies, `back_N` undoes it."""
        ctx.save_for_backward(back_N)
        ctx.top_k = top_k
        return x_TD.index_select(0, order_N // top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """The sum of a token's copies."""
        (back_N,) = ctx.saved_tensors
        return grads[0].index_select(0, back_N).unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


class Reorder(torch.autograd.Function):
    """Rows in another order; the gradient, back in theirs."""

    @staticmethod
    def forward(ctx: Any, y_ND: Tensor, order_N: Tensor, back_N: Tensor) -> Tensor:
        """`back_N` undoes `order_N`."""
        ctx.save_for_backward(back_N)
        return y_ND.index_select(0, order_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """The opposite."""
        (back_N,) = ctx.saved_tensors
        return grads[0].index_select(0, back_N), None, None
