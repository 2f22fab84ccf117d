"""Products of token copies and their experts' matrices, without a loop over experts where there is something better.

Shapes: N token copies sorted by expert, D and F features, E experts, C rows that every expert is padded to. What they
cost and save is in `ops/experts.py`.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from danlu.torch_compat import grouped_mm

_MOST_PADDING = 1.5
"""Rows with padding over rows, up to which one product of padded experts takes less time than one for each."""
_ALIGNMENT = 16
"""Bytes of which a row must be a multiple in a grouped product."""


class ExpertProducts(Protocol):
    """One way to multiply token copies by their experts' matrices."""

    def enter(self, x_ND: Tensor) -> Tensor:
        """Copies in the form that products take."""
        ...

    def product(self, x: Tensor, weight_EDF: Tensor, bias_EF: Tensor | None) -> Tensor:
        """Every copy times the matrix of its expert, plus its bias."""
        ...

    def leave(self, y: Tensor) -> Tensor:
        """The copies again, in their order."""
        ...


def expert_products(x_ND: Tensor, counts: Sequence[int] | Tensor) -> ExpertProducts:
    """The way for these copies, of which the e-th expert has `counts[e]`; counts on the device are not read.

    On a CPU one batched product of experts padded to the fullest, if little is padded: products of single experts are
    too small for several threads. Elsewhere a grouped product.
    """
    groups = (
        grouped_mm is not None
        and x_ND.shape[-1] * x_ND.element_size() % _ALIGNMENT == 0
        and (x_ND.dtype == torch.bfloat16 or (x_ND.dtype == torch.float32 and x_ND.device.type == "cpu"))
    )
    if isinstance(counts, Tensor):
        if groups:
            return GroupedProducts(counts)
        counts = counts.tolist()
    if x_ND.device.type == "cpu":
        padded = max(counts, default=0) * len(counts)
        return PaddedProducts(counts) if padded <= _MOST_PADDING * len(x_ND) else LoopedProducts(counts)
    return GroupedProducts(torch.tensor(counts, device=x_ND.device)) if groups else LoopedProducts(counts)


class LoopedProducts:
    """A product for every expert: the reference."""

    def __init__(self, counts: Sequence[int], multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul) -> None:
        """`multiply` is the product of an expert's copies and one of its matrices, if that is quantized."""
        self.counts, self.multiply = list(counts), multiply

    def enter(self, x_ND: Tensor) -> Tensor:
        """As they are."""
        return x_ND

    def product(self, x: Tensor, weight_EDF: Tensor, bias_EF: Tensor | None) -> Tensor:
        """One expert after another."""
        # Unbound at once: the gradient of indexing one expert would be as large as that of all, mostly zeros.
        pairs = zip(x.split(self.counts), weight_EDF.unbind(), strict=True)
        made = [self.multiply(part, weight) for part, weight in pairs]
        if bias_EF is not None:
            made = [part + bias for part, bias in zip(made, bias_EF.unbind(), strict=True)]
        return torch.cat(made)

    def leave(self, y: Tensor) -> Tensor:
        """As they are."""
        return y


class PaddedProducts:
    """One batched product: every expert has as many rows as the fullest, the rest of them zeros."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.experts, self.rows = len(counts), max(counts, default=0)
        firsts = [0, *accumulate(counts)][: len(counts)]
        shifts = torch.tensor([expert * self.rows - first for expert, first in enumerate(firsts)])
        self.place_N = torch.arange(sum(counts)) + shifts.repeat_interleave(
            torch.tensor(counts), output_size=sum(counts)
        )

    def enter(self, x_ND: Tensor) -> Tensor:
        """Copies at their experts' places, E × C × D."""
        return _PlaceRows.apply(x_ND, self.place_N, self.experts * self.rows).unflatten(0, (self.experts, -1))

    def product(self, x: Tensor, weight_EDF: Tensor, bias_EF: Tensor | None) -> Tensor:
        """Padding stays zero, or becomes a bias that nothing reads."""
        return torch.bmm(x, weight_EDF) if bias_EF is None else torch.baddbmm(bias_EF[:, None], x, weight_EDF)

    def leave(self, y: Tensor) -> Tensor:
        """The rows that are copies."""
        return _TakeRows.apply(y.flatten(0, 1), self.place_N)


class GroupedProducts:
    """One grouped product, which reads where experts begin on the device."""

    def __init__(self, counts_E: Tensor) -> None:
        self.counts_E = counts_E
        self.ends_E = counts_E.cumsum(0).to(torch.int32)

    def enter(self, x_ND: Tensor) -> Tensor:
        """As they are."""
        return x_ND

    def product(self, x: Tensor, weight_EDF: Tensor, bias_EF: Tensor | None) -> Tensor:
        """By `torch.nn.functional.grouped_mm`."""
        assert grouped_mm is not None
        y: Tensor = grouped_mm(x, weight_EDF, offs=self.ends_E)
        if bias_EF is None:
            return y
        return y + bias_EF.repeat_interleave(self.counts_E, dim=0, output_size=len(x))

    def leave(self, y: Tensor) -> Tensor:
        """As they are."""
        return y


class _PlaceRows(torch.autograd.Function):
    """Rows at places of which no two are the same, zeros between; torch's own gradients would add into zeros."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, place_N: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(place_N)
        return x_ND.new_zeros(rows, x_ND.shape[1]).index_copy_(0, place_N, x_ND)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (place_N,) = ctx.saved_tensors
        return grads[0].index_select(0, place_N), None, None


class _TakeRows(torch.autograd.Function):
    """The opposite."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, place_N: Tensor) -> Tensor:
        ctx.save_for_backward(place_N)
        ctx.rows = len(y_RD)
        return y_RD.index_select(0, place_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (place_N,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.rows, grads[0].shape[1]).index_copy_(0, place_N, grads[0]), None
