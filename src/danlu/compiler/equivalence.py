"""The one rule by which compiled code equals eager code: it may not be further from the truth than eager is.

The truth is the same computation in a wider dtype. What eager code itself is off by, on these inputs and on inputs
that differ by one rounding, is what this computation in this dtype is uncertain by; compiled code may be off by a small
multiple of that. A fixed tolerance would be too wide for a copy and too narrow for a router, in which one rounding
sends a token to another expert.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

NamedTensors = Mapping[str, Tensor]

LARGEST_FACTOR, LARGEST_FLOOR = 4.0, 2.0
"""The largest error may be this multiple of eager's, plus this many roundings of the tensor's largest value."""
MEAN_FACTOR, MEAN_FLOOR = 3.0, 0.5
"""The same of root mean squares. Noise averages out there, so that a small error in many elements is found."""
ENOUGH_ELEMENTS = 256
"""Below, a root mean square is as uncertain as the largest error, and only that is compared."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A tensor that compiled code gets wrong; `str` says by how much."""

    tensor: str
    measure: str
    """Largest or root mean square error."""
    error: float
    allowed: float
    eager_error: float
    scale: float
    """Largest or root mean square value of the tensor."""

    def __str__(self) -> str:
        return (
            f"{self.tensor} has a {self.measure} error of {self.error:.3g} where at most {self.allowed:.3g} is "
            f"rounding (eager: {self.eager_error:.3g}; {self.measure} value: {self.scale:.3g})"
        )


def find_difference(truth: NamedTensors, eager: Sequence[NamedTensors], compiled: NamedTensors) -> Difference | None:
    """The tensor in which compiled code is worst, by how many times it exceeds the rule; None if all obey it.

    `eager` holds one or more eager runs, the first on the very inputs of `compiled`. A tensor that a run does not have
    counts as zeros: autograd leaves out gradients that compiled code returns as zeros.
    """
    worst: tuple[float, Difference] | None = None
    for name in dict.fromkeys([*eager[0], *compiled]):
        found = _compare(name, truth.get(name), [run.get(name) for run in eager], compiled.get(name))
        if found is not None:
            excess = found.error / found.allowed if found.allowed else float("inf")
            if worst is None or not excess <= worst[0]:
                worst = excess, found
    return None if worst is None else worst[1]


def _compare(
    name: str, truth: Tensor | None, eager: Sequence[Tensor | None], compiled: Tensor | None
) -> Difference | None:
    like = compiled if compiled is not None else eager[0]
    assert like is not None
    true, actual = _values(truth, like), _values(compiled, like)
    expected = [_values(run, like) for run in eager]
    if true.numel() == 0:
        return None
    odd = _not_finite_alike(name, expected[0], actual)
    if odd is not None:
        return odd
    rounding = torch.finfo(like.dtype).eps if like.dtype.is_floating_point else 0.0
    measures = [("largest", _largest, LARGEST_FACTOR, LARGEST_FLOOR)]
    if true.numel() >= ENOUGH_ELEMENTS:
        measures.append(("root mean square", _root_mean_square, MEAN_FACTOR, MEAN_FLOOR))
    for measure, norm, factor, floor in measures:
        error, scale = norm(actual - true), norm(true)
        eager_error = max(norm(run - true) for run in expected)
        allowed = factor * eager_error + floor * rounding * scale
        if error > allowed:
            return Difference(
                tensor=name, measure=measure, error=error, allowed=allowed, eager_error=eager_error, scale=scale
            )
    return None


def _not_finite_alike(name: str, expected: Tensor, actual: Tensor) -> Difference | None:
    """A difference if compiled code has infinities or NaN where eager has numbers, or the other way round."""
    wrong = int((expected.isfinite() != actual.isfinite()).sum())
    if not wrong:
        return None
    return Difference(
        tensor=name,
        measure="number of elements with a non-finite",
        error=float(wrong),
        allowed=0.0,
        eager_error=0.0,
        scale=float(expected.numel()),
    )


def _values(tensor: Tensor | None, like: Tensor) -> Tensor:
    """This rank's values in fp64."""
    local = _to_local(like if tensor is None else tensor).detach()
    if local.is_complex():
        local = torch.view_as_real(local)
    return torch.zeros_like(local, dtype=torch.float64) if tensor is None else local.double()


def _to_local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _largest(values: Tensor) -> float:
    return float(_finite(values).abs().max())


def _root_mean_square(values: Tensor) -> float:
    return float(_finite(values).square().mean().sqrt())


def _finite(values: Tensor) -> Tensor:
    """Infinities are compared by where they are; their differences are NaN."""
    return values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
