"""Compare an implementation of an operator with its reference: results and gradients, on small odd shapes.

Sizes are no multiples of anything that tiles are made of, so that a mask which is wrong shows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from danlu.ops.operators.operator import Implementation, Operator


@dataclass(frozen=True)
class Deviation:
    """A result that is farther from the reference in fp64 than its operator allows."""

    case: str
    dtype: torch.dtype
    error: float
    """As a share of the largest value expected; not a number if the result has one."""
    allowed: float

    def __str__(self) -> str:
        return f"{self.case} in {self.dtype} is off by {self.error:.1e}, allowed {self.allowed:.1e}"


Results = dict[str, tuple[Tensor, Tensor]]
"""Found and expected, by name."""


def check_implementation(
    operator: Operator, implementation: Implementation, device: torch.device | str, dtype: torch.dtype
) -> list[Deviation]:
    """What an implementation computes otherwise than its operator's reference in fp64 on the host; empty if nothing."""
    if operator.name not in _CASES:
        raise ValueError(f"`operator` must be one of {', '.join(_CASES)}, but is {operator.name} instead")
    allowed = operator.allowed_error[dtype]
    return [
        Deviation(f"{operator.name} {case}", dtype, error, allowed)
        for case, (found, expected) in _CASES[operator.name](operator, implementation, torch.device(device), dtype)
        if not (error := relative_error(found, expected)) <= allowed
    ]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest value expected."""
    if found.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    difference = (found.detach().cpu().double() - expected.detach()).abs()
    return float(difference.max() / expected.detach().abs().max().clamp(min=1e-30))


class _Values:
    """Tensors of one check: drawn in fp64, rounded to a dtype, and given to both sides as the same numbers."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(1)

    def draw(self, *shape: int, scale: float = 1.0) -> Tensor:
        """On the host, in fp64, of values that the dtype has."""
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale
        return drawn.to(self.dtype).double().requires_grad_()

    def move(self, exact: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """On the device, in the dtype."""
        return exact.detach().to(dtype or self.dtype).to(self.device)


Cases = Iterator[tuple[str, tuple[Tensor, Tensor]]]
_Check = Callable[[Operator, Implementation, torch.device, torch.dtype], Cases]


def _rms_norm(operator: Operator, implementation: Implementation, device: torch.device, dtype: torch.dtype) -> Cases:
    for rows, width, offset in ((131, 37, 1.0), (29, 1500, 0.0)):
        values = _Values(device, dtype)
        x, weight, upstream = values.draw(rows, width), values.draw(width), values.draw(rows, width)
        expected = operator.reference(x, weight, 1e-6, offset)
        gradients = torch.autograd.grad(expected, (x, weight), upstream)
        mine, scale = values.move(x), values.move(weight)
        y, rstd = implementation.forward(mine, scale, 1e-6, offset)
        found = implementation.backward(values.move(upstream), mine, scale, rstd, offset)
        yield f"of {rows} × {width}", (y, expected)
        yield f"gradient of {rows} × {width}", (found[0], gradients[0])
        yield f"gradient of the weight of {rows} × {width}", (found[1], gradients[1])


def _gated_product(
    operator: Operator, implementation: Implementation, device: torch.device, dtype: torch.dtype
) -> Cases:
    for activation in ("swiglu", "geglu", "clamped_swiglu"):
        values = _Values(device, dtype)
        gate, up, upstream = values.draw(33, 67, scale=4.0), values.draw(33, 67, scale=4.0), values.draw(33, 67)
        expected = operator.reference(gate, up, activation)
        gradients = torch.autograd.grad(expected, (gate, up), upstream)
        inputs = values.move(gate), values.move(up)
        found = implementation.backward(values.move(upstream), *inputs, activation)
        yield activation, (implementation.forward(*inputs, activation), expected)
        yield f"{activation} gradient of the gate", (found[0], gradients[0])
        yield f"{activation} gradient of the values", (found[1], gradients[1])


def _rotate(operator: Operator, implementation: Implementation, device: torch.device, dtype: torch.dtype) -> Cases:
    for tables in ((5, 11), (3, 5, 11)):
        values = _Values(device, dtype)
        x, upstream, angle = values.draw(3, 5, 3, 22), values.draw(3, 5, 3, 22), values.draw(*tables, scale=3.0)
        cos, sin = angle.cos().float(), angle.sin().float()
        expected = operator.reference(x, cos.double(), sin.double())
        (gradient,) = torch.autograd.grad(expected, (x,), upstream)
        turned = values.move(cos, torch.float32), values.move(sin, torch.float32)
        yield f"by tables of {len(tables)} dims", (implementation.forward(values.move(x), *turned), expected)
        yield "gradient", (implementation.backward(values.move(upstream), *turned), gradient)


def _cross_entropy(
    operator: Operator, implementation: Implementation, device: torch.device, dtype: torch.dtype
) -> Cases:
    for rows, width, first in ((7, 133, 0), (3, 4999, 1000)):
        values = _Values(device, dtype)
        logits, factors = values.draw(rows, width, scale=4.0), torch.linspace(0, 2, rows).double()
        targets = torch.arange(rows) * (width // rows)
        losses = operator.reference(logits, targets)
        (gradient,) = torch.autograd.grad((losses * factors).sum(), (logits,))
        mine, named = values.move(logits), (targets + first).to(device)
        highest, sums, at_target = implementation.forward(mine, named, first)
        weights = values.move(factors, torch.float32)
        yield f"of {width} logits", (sums.log() + (highest - at_target), losses)
        yield (
            f"gradient of {width} logits",
            (implementation.backward(mine, named, highest, sums, weights, first), gradient),
        )
        _, _, elsewhere = implementation.forward(mine, named + width, first)
        yield "of targets held elsewhere", (elsewhere + 1.0, torch.ones(rows, dtype=torch.float64))
        _, nothing, _ = implementation.forward(torch.full_like(mine, -torch.inf), named, first)
        yield "of logits that are all -inf", (nothing + 1.0, torch.ones(rows, dtype=torch.float64))


def _masked_attention(
    operator: Operator, implementation: Implementation, device: torch.device, dtype: torch.dtype
) -> Cases:
    """Documents that begin inside of a tile; and a window, alike in both sequences, with fewer heads of keys."""
    length = 150
    place = torch.arange(length)
    documents = torch.stack([place // 23 * 23, place // 131 * 131])
    window = (place - 32).clamp(min=0)[None]  # the last query that sees the last key of a tile begins its own
    for name, first, heads, groups, width in (("documents", documents, 2, 2, 24), ("a window", window, 4, 2, 16)):
        values = _Values(device, dtype)
        q, k, v = (values.draw(2, length, count, width) for count in (heads, groups, groups))
        upstream = values.draw(2, length, heads, width)
        expected = operator.reference(q, k, v, first, 0.3)
        gradients = torch.autograd.grad(expected, (q, k, v), upstream)
        mine, seen = [values.move(each) for each in (q, k, v)], first.to(torch.int32).to(device)
        y, logsumexp = implementation.forward(*mine, seen, 0.3)
        found = implementation.backward(values.move(upstream), *mine, y, logsumexp, seen, 0.3)
        yield f"of {name}", (y, expected)
        for of, got, wanted in zip(("queries", "keys", "values"), found, gradients, strict=True):
            yield f"gradient of {of} of {name}", (got, wanted)


def _grouped_mm(operator: Operator, implementation: Implementation, device: torch.device, dtype: torch.dtype) -> Cases:
    """Experts without a token at the beginning, the end and between."""
    for counts, width, columns in (([0, 70, 1, 0, 45], 37, 150), ([16, 0], 24, 8)):
        values, ends = _Values(device, dtype), torch.tensor(counts).cumsum(0).to(torch.int32)
        x, weight = values.draw(sum(counts), width), values.draw(len(counts), width, columns)
        upstream = values.draw(sum(counts), columns)
        expected = operator.reference(x, weight, ends)
        gradients = torch.autograd.grad(expected, (x, weight), upstream)
        mine, matrices, back, ends = values.move(x), values.move(weight), values.move(upstream), ends.to(device)
        yield f"of {counts} tokens", (implementation.forward(mine, matrices, ends), expected)
        yield f"gradient of {counts} tokens", (implementation.backward(back, matrices, ends), gradients[0])
        yield f"gradient of matrices, {counts} tokens", (implementation.backward(back, mine, ends), gradients[1])


def _quantize_rows(
    operator: Operator, implementation: Implementation, device: torch.device, dtype: torch.dtype
) -> Cases:
    """Of numbers of many magnitudes, zeros and the subnormal among them; also of rows that are columns in memory."""
    for block, powers in ((128, False), (32, True)):
        drawn = torch.randn(19, 300, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 300)
        drawn[3, :128], drawn[4], drawn[5, 7] = 0.0, drawn[4] * 1e-30, 448 * 2.0**-4
        for name, x in ((f"{block} a block", drawn.to(dtype)), (f"{block} a block, by columns", drawn.to(dtype).t())):
            values, scales = operator.reference(x, block, powers)
            mine = x.to(device)  # keeps strides
            found_values, found_scales = implementation.forward(mine, block, powers)
            yield f"of {name}", (found_values.view(torch.uint8), values.view(torch.uint8).double())
            yield f"scales of {name}", (found_scales, scales.double())


_CASES: dict[str, _Check] = {
    "rms_norm": _rms_norm,
    "gated_product": _gated_product,
    "rotate": _rotate,
    "cross_entropy": _cross_entropy,
    "masked_attention": _masked_attention,
    "grouped_mm": _grouped_mm,
    "quantize_rows": _quantize_rows,
}
