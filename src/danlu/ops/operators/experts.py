"""Products of token copies and their experts' matrices: all experts in one operator where there is one.

Shapes: N token copies sorted by expert, D and F features, E experts. What they cost and save is in `ops/experts.py`.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from danlu.native.cpu_features import emulated_formats
from danlu.ops.operators import cpu
from danlu.ops.operators.operator import Implementation, Operator, define_operator
from danlu.torch_compat import grouped_mm as torch_grouped_mm
from danlu.torch_compat import is_gradient_wanted

_MOST_PADDING = 1.5
"""Rows with padding over rows, up to which one product of padded experts takes less time than one for each."""
_ALIGNMENT = 16
"""Bytes of which a row must be a multiple in torch's grouped product."""


_FORWARD, _INPUT, _WEIGHT = range(3)
"""The product, and the gradients of copies and of matrices, as `native/cpu_grouped_mm.c` numbers them."""


class ExpertProducts(Protocol):
    """One way to multiply token copies by their experts' matrices."""

    def __call__(self, x_ND: Tensor, weight_EDF: Tensor, bias_EF: Tensor | None) -> Tensor:
        """Every copy times the matrix of its expert, plus its bias."""
        ...


def expert_products(x_ND: Tensor, counts: Sequence[int] | Tensor) -> ExpertProducts:
    """The way for these copies, of which the e-th expert has `counts[e]`; counts on the device are not read.

    On a CPU the operator below, elsewhere torch's grouped product, which reads where experts begin on the device.
    """
    if x_ND.device.type == "cpu":
        return CountedProducts(counts.tolist() if isinstance(counts, Tensor) else counts)
    aligned = x_ND.shape[-1] * x_ND.element_size() % _ALIGNMENT == 0
    if torch_grouped_mm is not None and aligned and x_ND.dtype == torch.bfloat16:
        return GroupedProducts(counts if isinstance(counts, Tensor) else torch.tensor(counts, device=x_ND.device))
    return LoopedProducts(counts.tolist() if isinstance(counts, Tensor) else counts)


class LoopedProducts:
    """A product for every expert: the reference."""

    def __init__(self, counts: Sequence[int], multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul) -> None:
        """`multiply` is the product of an expert's copies and one of its matrices, if that is quantized."""
        self.counts, self.multiply = list(counts), multiply

    def __call__(self, x_ND: Tensor, weight_EDF: Tensor, bias_EF: Tensor | None) -> Tensor:
        """One expert after another."""
        # Unbound at once: the gradient of indexing one expert would be as large as that of all, mostly zeros.
        pairs = zip(x_ND.split(self.counts), weight_EDF.unbind(), strict=True)
        made = [self.multiply(part, weight) for part, weight in pairs]
        if bias_EF is not None:
            made = [part + bias for part, bias in zip(made, bias_EF.unbind(), strict=True)]
        return torch.cat(made)


class GroupedProducts:
    """torch's grouped product, with counts that stay on the device."""

    def __init__(self, counts_E: Tensor) -> None:
        self.counts_E = counts_E
        self.ends_E = counts_E.cumsum(0).to(torch.int32)

    def __call__(self, x_ND: Tensor, weight_EDF: Tensor, bias_EF: Tensor | None) -> Tensor:
        """By `torch.nn.functional.grouped_mm`."""
        assert torch_grouped_mm is not None
        return _with_bias(torch_grouped_mm(x_ND, weight_EDF, offs=self.ends_E), bias_EF, self.counts_E)


class CountedProducts:
    """The operator `danlu::grouped_mm`, with counts that the host knows."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = list(counts)

    def __call__(self, x_ND: Tensor, weight_EDF: Tensor, bias_EF: Tensor | None) -> Tensor:
        """By the implementation for these tensors."""
        y_NF: Tensor = torch.ops.danlu.grouped_mm(x_ND.contiguous(), weight_EDF.contiguous(), self.counts)
        return y_NF if bias_EF is None else _with_bias(y_NF, bias_EF, torch.tensor(self.counts))


def _with_bias(y_NF: Tensor, bias_EF: Tensor | None, counts_E: Tensor) -> Tensor:
    return y_NF if bias_EF is None else y_NF + bias_EF.repeat_interleave(counts_E, dim=0, output_size=len(y_NF))


def reference(x_ND: Tensor, weight_EDF: Tensor, counts: Sequence[int]) -> Tensor:
    """Every copy times the matrix of its expert."""
    return LoopedProducts(counts)(x_ND, weight_EDF, None)


GROUPED_MM = Operator(
    "grouped_mm",
    reference,
    {torch.float64: 2.0**-40, torch.float32: 2.0**-17, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-6},
)


def _forward(x_ND: Tensor, weight_EDF: Tensor, counts: list[int]) -> Tensor:
    """As `reference`."""
    return GROUPED_MM.implementation(x_ND).forward(x_ND, weight_EDF, counts)


def _input_gradient(gradient_NF: Tensor, weight_EDF: Tensor, counts: list[int]) -> Tensor:
    """The gradient of copies."""
    return GROUPED_MM.implementation(gradient_NF).backward(_INPUT, gradient_NF, weight_EDF, counts)


def _weight_gradient(gradient_NF: Tensor, x_ND: Tensor, counts: list[int]) -> Tensor:
    """The gradient of matrices; zeros for an expert without copies."""
    return GROUPED_MM.implementation(gradient_NF).backward(_WEIGHT, gradient_NF, x_ND, counts)


def _forward_fake(x_ND: Tensor, weight_EDF: Tensor, counts: list[int]) -> Tensor:
    return x_ND.new_empty(x_ND.shape[0], weight_EDF.shape[2])


def _input_fake(gradient_NF: Tensor, weight_EDF: Tensor, counts: list[int]) -> Tensor:
    return gradient_NF.new_empty(gradient_NF.shape[0], weight_EDF.shape[1])


def _weight_fake(gradient_NF: Tensor, x_ND: Tensor, counts: list[int]) -> Tensor:
    return gradient_NF.new_empty(len(counts), x_ND.shape[1], gradient_NF.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, list[int]], output: Tensor) -> None:
    x_ND, weight_EDF, ctx.counts = inputs
    ctx.save_for_backward(x_ND, weight_EDF)


def _differentiate(ctx: Any, gradient_NF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    # Two operators: a schedule that splits the backward pass asks for one gradient at a time.
    (x_ND, weight_EDF), ops = ctx.saved_tensors, torch.ops.danlu
    gradient_NF = gradient_NF.contiguous()
    for_x, for_weight = (is_gradient_wanted(node) for node, _ in ctx.next_functions)
    return (
        ops.grouped_mm_input_gradient(gradient_NF, weight_EDF, ctx.counts) if for_x else None,
        ops.grouped_mm_weight_gradient(gradient_NF, x_ND, ctx.counts) if for_weight else None,
        None,
    )


define_operator(
    "grouped_mm",
    "(Tensor x, Tensor weight, int[] counts) -> Tensor",
    _forward,
    _forward_fake,
    _save,
    _differentiate,
)
define_operator(
    "grouped_mm_input_gradient",
    "(Tensor gradient, Tensor weight, int[] counts) -> Tensor",
    _input_gradient,
    _input_fake,
)
define_operator(
    "grouped_mm_weight_gradient",
    "(Tensor gradient, Tensor x, int[] counts) -> Tensor",
    _weight_gradient,
    _weight_fake,
)


@register_flop_formula(torch.ops.danlu.grouped_mm)
def _forward_flops(x_shape: list[int], weight_shape: list[int], *_: object, **__: object) -> int:
    return 2 * x_shape[0] * x_shape[1] * weight_shape[2]


@register_flop_formula(torch.ops.danlu.grouped_mm_input_gradient)
def _input_flops(gradient_shape: list[int], weight_shape: list[int], *_: object, **__: object) -> int:
    return 2 * gradient_shape[0] * gradient_shape[1] * weight_shape[1]


@register_flop_formula(torch.ops.danlu.grouped_mm_weight_gradient)
def _weight_flops(gradient_shape: list[int], x_shape: list[int], *_: object, **__: object) -> int:
    return 2 * gradient_shape[0] * gradient_shape[1] * x_shape[1]


def _torch_forward(x_ND: Tensor, weight_EDF: Tensor, counts: list[int]) -> Tensor:
    if (padding := _Padding.of(counts)) is not None:
        return padding.leave(torch.bmm(padding.enter(x_ND), weight_EDF))
    return reference(x_ND, weight_EDF, counts)


def _torch_backward(kind: int, gradient_NF: Tensor, other: Tensor, counts: list[int]) -> Tensor:
    """`other` is the matrices for the gradient of copies, and copies for that of matrices."""
    padding = _Padding.of(counts)
    if kind == _INPUT:
        if padding is not None:
            return padding.leave(torch.bmm(padding.enter(gradient_NF), other.transpose(1, 2)))
        parts = zip(gradient_NF.split(counts), other.unbind(), strict=True)
        return torch.cat([part @ weight.t() for part, weight in parts])
    if padding is not None:
        return torch.bmm(padding.enter(other).transpose(1, 2), padding.enter(gradient_NF))
    pairs = zip(other.split(counts), gradient_NF.split(counts), strict=True)
    return torch.stack([part.t() @ gradient for part, gradient in pairs])


class _Padding:
    """Every expert with as many rows as the fullest: one batched product, if little is padded."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.experts, self.rows = len(counts), max(counts)
        firsts = [0, *accumulate(counts)][: len(counts)]
        shifts = torch.tensor([expert * self.rows - first for expert, first in enumerate(firsts)])
        self.place_N = torch.arange(sum(counts)) + shifts.repeat_interleave(
            torch.tensor(counts), output_size=sum(counts)
        )

    @classmethod
    def of(cls, counts: Sequence[int]) -> "_Padding | None":
        """None where single products take less time."""
        padded = max(counts, default=0) * len(counts)
        return cls(counts) if 0 < padded <= _MOST_PADDING * sum(counts) else None

    def enter(self, x_ND: Tensor) -> Tensor:
        """Rows at their experts' places, zeros between: E × C × D."""
        placed = x_ND.new_zeros(self.experts * self.rows, x_ND.shape[1]).index_copy_(0, self.place_N, x_ND)
        return placed.unflatten(0, (self.experts, self.rows))

    def leave(self, y_ECF: Tensor) -> Tensor:
        """The rows that are copies, in their order."""
        return y_ECF.flatten(0, 1).index_select(0, self.place_N)


def _native_forward(x_ND: Tensor, weight_EDF: Tensor, counts: list[int]) -> Tensor:
    y_NF = x_ND.new_empty(x_ND.shape[0], weight_EDF.shape[2])
    _multiply(_FORWARD, x_ND, weight_EDF, y_NF, counts)
    return y_NF


def _native_backward(kind: int, gradient_NF: Tensor, other: Tensor, counts: list[int]) -> Tensor:
    if kind == _INPUT:
        x_gradient = gradient_NF.new_empty(gradient_NF.shape[0], other.shape[1])
        _multiply(_INPUT, x_gradient, other, gradient_NF, counts)
        return x_gradient
    weight_gradient = gradient_NF.new_empty(len(counts), other.shape[1], gradient_NF.shape[1])
    _multiply(_WEIGHT, other, weight_gradient, gradient_NF, counts)
    return weight_gradient


def _multiply(kind: int, x_ND: Tensor, weight_EDF: Tensor, y_NF: Tensor, counts: list[int]) -> None:
    cpu.grouped_mm(kind, x_ND, weight_EDF, y_NF, torch.tensor(counts).cumsum(0))


# Where a processor has instructions for bf16, products of torch's libraries use them, and these do not.
_NATIVE_DTYPES = (torch.float32, torch.bfloat16) if "bf16" in emulated_formats() else (torch.float32,)

GROUPED_MM.implementations += [
    Implementation(
        "torch", _torch_forward, _torch_backward, "one batched product if little is padded, else one for each"
    ),
    Implementation(
        "native",
        _native_forward,
        _native_backward,
        "in C, all experts at once, computing in fp32",
        devices=("cpu",),
        dtypes=_NATIVE_DTYPES,
        why_not=cpu.why_no_grouped_mm,
    ),
]
