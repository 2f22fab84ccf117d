"""One update of AdamW in one pass: parameter, gradient and both moments are read and written once.

The numbers are those of `torch.optim.AdamW`: decoupled weight decay, moments corrected for their start.
"""

# Triton reads the annotations of a kernel, so its parameters have none but `constexpr`.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from danlu.language.declaration import Kernel, Shapes, Tile, TileNeeds
from danlu.language.launch import launch


@triton.jit
def _update(
    parameter_ptr, gradient_ptr, mean_ptr, square_ptr, elements,
    kept, fresh1, beta2, fresh2, rate, root_correction, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one block; `kept` is what weight decay leaves, `fresh` 1 - beta, which fp32 would round to few bits."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < elements
    gradient = tl.load(gradient_ptr + place, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + place, mask=inside, other=0.0).to(tl.float32)
    square = tl.load(square_ptr + place, mask=inside, other=0.0).to(tl.float32)
    parameter = tl.load(parameter_ptr + place, mask=inside, other=0.0).to(tl.float32)
    mean += (gradient - mean) * fresh1
    square = square * beta2 + gradient * gradient * fresh2
    parameter = parameter * kept - rate * mean / (tl.sqrt_rn(square) / root_correction + eps)
    tl.store(mean_ptr + place, mean.to(mean_ptr.dtype.element_ty), mask=inside)
    tl.store(square_ptr + place, square.to(square_ptr.dtype.element_ty), mask=inside)
    tl.store(parameter_ptr + place, parameter.to(parameter_ptr.dtype.element_ty), mask=inside)


def _needs(shapes: Shapes, constants: Mapping[str, int], tile: Tile, element_bytes: int) -> TileNeeds:
    return TileNeeds(values=6 * constants["BLOCK"])


ADAMW = Kernel(
    name="adamw",
    function=_update,
    arguments={"parameter_ptr": "*fp32", "gradient_ptr": "*x", "mean_ptr": "*fp32", "square_ptr": "*fp32",
               "elements": "i64", "kept": "fp32", "fresh1": "fp32", "beta2": "fp32", "fresh2": "fp32",
               "rate": "fp32", "root_correction": "fp32", "eps": "fp32"},
    grid=lambda shapes, constants: (triton.cdiv(shapes["elements"], constants["BLOCK"]),),
    tiles=(Tile({"BLOCK": 1024}, 128),),
    needs=_needs,
    example={"elements": 4096 * 14336},
)  # fmt: skip


def adamw_update(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """Update a parameter and its moments in place; `step` counts from 1. All four are contiguous."""
    if any(not each.is_contiguous() for each in (parameter, exp_avg, exp_avg_sq)):
        raise ValueError("`parameter`, `exp_avg` and `exp_avg_sq` must be contiguous: they are updated in place")
    beta1, beta2 = betas
    rate, root_correction = lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
    tensors, elements = (parameter, gradient.contiguous(), exp_avg, exp_avg_sq), parameter.numel()
    numbers = 1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, rate, root_correction, eps
    launch(ADAMW, {"elements": elements}, parameter, *tensors, elements, *numbers)
