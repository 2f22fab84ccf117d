"""Products of token copies and their experts' matrices: all experts in one operator where there is one.

Shapes: N token copies sorted by expert, D and F features, E experts. What they cost and save is in `ops/experts.py`.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
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

_FORWARD, _INPUT, _WEIGHT = range(3)
"""The product, and the gradients of copies and of matrices, as `native/cpu_grouped_mm.c` numbers them."""


class ExpertProducts(Protocol):
    """One way to multiply token copies by their experts' matrices."""

    def __call__(self, x_ND: Tensor, weight_EDF: Tensor, bias_EF: Tensor | None) -> Tensor:
        """Every copy times the matrix of its expert, plus its bias."""
        ...


class LoopedProducts:
    """A product for every expert: the reference."""

    def __init__(
        self, counts: Sequence[int] | Tensor, multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul
    ) -> None:
        """`multiply` is the product of an expert's copies and one of its matrices, if that is quantized."""
        self.counts = counts.tolist() if isinstance(counts, Tensor) else list(counts)
        self.multiply = multiply

    def __call__(self, x_ND: Tensor, weight_EDF: Tensor, bias_EF: Tensor | None) -> Tensor:
        """One expert after another."""
        # Unbound at once: the gradient of indexing one expert would be as large as that of all, mostly zeros.
        pairs = zip(x_ND.split(self.counts), weight_EDF.unbind(), strict=True)
        made = [self.multiply(part, weight) for part, weight in pairs]
        if bias_EF is not None:
            made = [part + bias for part, bias in zip(made, bias_EF.unbind(), strict=True)]
        return torch.cat(made)


class GroupedProducts:
    """The operator `danlu::grouped_mm`; counts on a device stay there."""

    def __init__(self, counts: Sequence[int] | Tensor, device: torch.device | None = None) -> None:
        """The e-th expert has `counts[e]` copies; those that the host knows are sent to the `device`."""
        self.counts_E = counts if isinstance(counts, Tensor) else torch.tensor(counts, device=device)
        self.ends_E = self.counts_E.cumsum(0).to(torch.int32)

    def __call__(self, x_ND: Tensor, weight_EDF: Tensor, bias_EF: Tensor | None) -> Tensor:
        """By the implementation for these tensors."""
        y_NF = torch.ops.danlu.grouped_mm(x_ND.contiguous(), weight_EDF.contiguous(), self.ends_E)
        return self._with_bias(y_NF, bias_EF)

    def by_transposes(self, x_ND: Tensor, weight_EFD: Tensor, bias_EF: Tensor | None) -> Tensor:
        """With matrices that are stored as those of linear layers; none is copied."""
        y_NF = _ProductByTransposes.apply(x_ND.contiguous(), weight_EFD.contiguous(), self.ends_E)
        return self._with_bias(y_NF, bias_EF)

    def _with_bias(self, y_NF: Tensor, bias_EF: Tensor | None) -> Tensor:
        if bias_EF is None:
            return y_NF
        return y_NF + bias_EF.repeat_interleave(self.counts_E, dim=0, output_size=len(y_NF))


def reference(x_ND: Tensor, weight_EDF: Tensor, ends_E: Tensor) -> Tensor:
    """Every copy times the matrix of its expert."""
    return LoopedProducts(_counts(ends_E))(x_ND, weight_EDF, None)


def _counts(ends_E: Tensor) -> list[int]:
    """Copies of every expert, for which the host waits for the device."""
    ends = ends_E.tolist()
    return [end - start for start, end in pairwise([0, *ends])]


def _draw_even_loads(drawn: Sequence[Tensor]) -> None:
    """Give every expert as many copies, in the inputs of a call or of a gradient."""
    rows, ends_E = len(drawn[0]), drawn[-1]
    ends_E.copy_(torch.arange(1, len(ends_E) + 1) * rows // len(ends_E))


GROUPED_MM = Operator(
    "grouped_mm",
    reference,
    {torch.float64: 2.0**-40, torch.float32: 2.0**-17, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-6},
    complete=_draw_even_loads,
)


def _forward(x_ND: Tensor, weight_EDF: Tensor, ends_E: Tensor) -> Tensor:
    """As `reference`."""
    return GROUPED_MM.implementation(x_ND, weight_EDF).forward(x_ND, weight_EDF, ends_E)


def _input_gradient(gradient_NF: Tensor, weight_EDF: Tensor, ends_E: Tensor) -> Tensor:
    """The gradient of copies."""
    return GROUPED_MM.implementation(gradient_NF, weight_EDF).backward(gradient_NF, weight_EDF, ends_E)


def _weight_gradient(gradient_NF: Tensor, x_ND: Tensor, ends_E: Tensor) -> Tensor:
    """The gradient of matrices; zeros for an expert without copies."""
    return GROUPED_MM.implementation(gradient_NF, x_ND).backward(gradient_NF, x_ND, ends_E)


def _forward_fake(x_ND: Tensor, weight_EDF: Tensor, ends_E: Tensor) -> Tensor:
    return x_ND.new_empty(x_ND.shape[0], weight_EDF.shape[2])


def _input_fake(gradient_NF: Tensor, weight_EDF: Tensor, ends_E: Tensor) -> Tensor:
    return gradient_NF.new_empty(gradient_NF.shape[0], weight_EDF.shape[1])


def _weight_fake(gradient_NF: Tensor, x_ND: Tensor, ends_E: Tensor) -> Tensor:
    return gradient_NF.new_empty(len(ends_E), x_ND.shape[1], gradient_NF.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _wanted(ctx: Any) -> list[bool]:
    """Whether the backward pass that runs wants the gradient of copies, and that of matrices."""
    return [is_gradient_wanted(node) for node, _ in ctx.next_functions[:2]]


def _differentiate(ctx: Any, gradient_NF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    # Two operators: a schedule that splits the backward pass asks for one gradient at a time.
    (x_ND, weight_EDF, ends_E), ops = ctx.saved_tensors, torch.ops.danlu
    gradient_NF = gradient_NF.contiguous()
    for_x, for_weight = _wanted(ctx)
    return (
        ops.grouped_mm_input_gradient(gradient_NF, weight_EDF, ends_E) if for_x else None,
        ops.grouped_mm_weight_gradient(gradient_NF, x_ND, ends_E) if for_weight else None,
        None,
    )


define_operator(
    "grouped_mm",
    "(Tensor x, Tensor weight, Tensor ends) -> Tensor",
    _forward,
    _forward_fake,
    _save,
    _differentiate,
)
define_operator(
    "grouped_mm_input_gradient",
    "(Tensor gradient, Tensor weight, Tensor ends) -> Tensor",
    _input_gradient,
    _input_fake,
)
define_operator(
    "grouped_mm_weight_gradient",
    "(Tensor gradient, Tensor x, Tensor ends) -> Tensor",
    _weight_gradient,
    _weight_fake,
)


class _ProductByTransposes(torch.autograd.Function):
    """A product by transposes is what the gradient of copies is otherwise, and the other way round."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_ND, weight_EFD, ends_E)
        y_NF: Tensor = torch.ops.danlu.grouped_mm_input_gradient(x_ND, weight_EFD, ends_E)
        return y_NF

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x_ND, weight_EFD, ends_E), ops = ctx.saved_tensors, torch.ops.danlu
        gradient_NF = gradients[0].contiguous()
        for_x, for_weight = _wanted(ctx)
        return (
            ops.grouped_mm(gradient_NF, weight_EFD, ends_E) if for_x else None,
            ops.grouped_mm_weight_gradient(x_ND, gradient_NF, ends_E) if for_weight else None,
            None,
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


def _torch_forward(x_ND: Tensor, weight_EDF: Tensor, ends_E: Tensor) -> Tensor:
    counts = _counts(ends_E)
    if (padding := _Padding.of(counts, x_ND.device)) is not None:
        return padding.leave(torch.bmm(padding.enter(x_ND), weight_EDF))
    return LoopedProducts(counts)(x_ND, weight_EDF, None)


def _torch_backward(gradient_NF: Tensor, other: Tensor, ends_E: Tensor) -> Tensor:
    """`other` is the matrices for the gradient of copies, and copies for that of matrices."""
    counts = _counts(ends_E)
    padding = _Padding.of(counts, gradient_NF.device)
    if _is_matrices(other):
        if padding is not None:
            return padding.leave(torch.bmm(padding.enter(gradient_NF), other.transpose(1, 2)))
        parts = zip(gradient_NF.split(counts), other.unbind(), strict=True)
        return torch.cat([part @ weight.t() for part, weight in parts])
    if padding is not None:
        return torch.bmm(padding.enter(other).transpose(1, 2), padding.enter(gradient_NF))
    pairs = zip(other.split(counts), gradient_NF.split(counts), strict=True)
    return torch.stack([part.t() @ gradient for part, gradient in pairs])


def _is_matrices(other: Tensor) -> bool:
    """Whether a gradient is that of copies, which takes matrices, and not that of matrices, which takes copies."""
    return other.dim() == 3


class _Padding:
    """Every expert with as many rows as the fullest: one batched product, if little is padded."""

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        self.experts, self.rows = len(counts), max(counts)
        firsts = [0, *accumulate(counts)][: len(counts)]
        shifts = torch.tensor([expert * self.rows - first for expert, first in enumerate(firsts)])
        shift_N = shifts.repeat_interleave(torch.tensor(counts), output_size=sum(counts))
        self.place_N = (torch.arange(sum(counts)) + shift_N).to(device)

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> "_Padding | None":
        """None where single products take less time."""
        padded = max(counts, default=0) * len(counts)
        return cls(counts, device) if 0 < padded <= _MOST_PADDING * sum(counts) else None

    def enter(self, x_ND: Tensor) -> Tensor:
        """Rows at their experts' places, zeros between: E × C × D."""
        placed = x_ND.new_zeros(self.experts * self.rows, x_ND.shape[1]).index_copy_(0, self.place_N, x_ND)
        return placed.unflatten(0, (self.experts, self.rows))

    def leave(self, y_ECF: Tensor) -> Tensor:
        """The rows that are copies, in their order."""
        return y_ECF.flatten(0, 1).index_select(0, self.place_N)


def _native_forward(x_ND: Tensor, weight_EDF: Tensor, ends_E: Tensor) -> Tensor:
    y_NF = x_ND.new_empty(x_ND.shape[0], weight_EDF.shape[2])
    cpu.grouped_mm(_FORWARD, x_ND, weight_EDF, y_NF, ends_E.long())
    return y_NF


def _native_backward(gradient_NF: Tensor, other: Tensor, ends_E: Tensor) -> Tensor:
    if _is_matrices(other):
        x_gradient = gradient_NF.new_empty(gradient_NF.shape[0], other.shape[1])
        cpu.grouped_mm(_INPUT, x_gradient, other, gradient_NF, ends_E.long())
        return x_gradient
    weight_gradient = gradient_NF.new_empty(len(ends_E), other.shape[1], gradient_NF.shape[1])
    cpu.grouped_mm(_WEIGHT, other, weight_gradient, gradient_NF, ends_E.long())
    return weight_gradient


def _grouped_forward(x_ND: Tensor, weight_EDF: Tensor, ends_E: Tensor) -> Tensor:
    assert torch_grouped_mm is not None
    y_NF: Tensor = torch_grouped_mm(x_ND, weight_EDF, offs=ends_E)
    return y_NF


def _grouped_backward(gradient_NF: Tensor, other: Tensor, ends_E: Tensor) -> Tensor:
    if _is_matrices(other):
        return _grouped_forward(gradient_NF, other.mT, ends_E)
    return _grouped_forward(other.t(), gradient_NF, ends_E)


# Where a processor has instructions for bf16, products of torch's libraries use them, and these do not.
_NATIVE_DTYPES = (torch.float32, torch.bfloat16) if "bf16" in emulated_formats() else (torch.float32,)

GROUPED_MM.implementations += [
    Implementation(
        "torch", _torch_forward, _torch_backward, "one batched product if little is padded, else one for each"
    ),
    Implementation(
        "torch_grouped",
        _grouped_forward,
        _grouped_backward,
        "torch's own, which some chips have as one kernel; on others it waits for loads, and multiplies one by one",
        dtypes=(torch.bfloat16,),
        why_not=lambda: None if torch_grouped_mm else "torch 2.9 has none",
        on_cpu=False,
        row_bytes=16,
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
