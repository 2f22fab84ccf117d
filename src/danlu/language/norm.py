"""RMS norm: one pass over memory forward, one backward, in fp32 between.

Shapes: ... leading dims, D features. A program has some full rows in registers.
"""

# Triton reads the annotations of a kernel, so its parameters have none but `constexpr`.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from danlu.chips.kernel_targets import KernelTarget
from danlu.language.declaration import Kernel, Shapes, Tile, TileNeeds, power_above
from danlu.language.launch import grid_of, launch

_ELEMENTS = 4096
"""Of a program: rows that are narrower than this share one, so that a norm of heads does not start one for each."""
_PROGRAMS = 4
"""Programs of the backward pass for every compute unit; each has a sum of the weight's gradient of its own."""


@triton.jit
def _forward(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, rows, width, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalize `ROWS` rows, and keep the reciprocal root of their mean squares."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < width)
    x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1, keep_dims=True) / width + eps)
    scale = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32) + offset
    tl.store(y_ptr + row * width + column, (x * rstd * scale).to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def _backward(
    gradient_ptr, x_ptr, weight_ptr, rstd_ptr, x_gradient_ptr, sums_ptr,
    rows, width, offset, ROWS: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Gradient of every `PROGRAMS`-th group of rows, and their sum of the weight's: no atomics, the same every time."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    in_row = column < width
    scale = tl.load(weight_ptr + column, mask=in_row, other=0.0).to(tl.float32) + offset
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(program * ROWS, rows, PROGRAMS * ROWS):
        row = (first + tl.arange(0, ROWS))[:, None]
        inside = (row < rows) & in_row
        place = row * width + column
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        normed = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32) * rstd
        gradient = tl.load(gradient_ptr + place, mask=inside, other=0.0).to(tl.float32)
        total += gradient * normed
        scaled = gradient * scale
        x_gradient = (scaled - normed * (tl.sum(scaled * normed, 1, keep_dims=True) / width)) * rstd
        tl.store(x_gradient_ptr + place, x_gradient.to(x_gradient_ptr.dtype.element_ty), mask=inside)
    column = tl.arange(0, BLOCK)
    tl.store(sums_ptr + program * width + column, tl.sum(total, 0), mask=column < width)


def _constants(shapes: Shapes, tile: Tile, target: KernelTarget) -> dict[str, int]:
    block = power_above(shapes["width"])
    return {"ROWS": max(1, tile.sizes["ELEMENTS"] // block), "BLOCK": block}


def _backward_constants(shapes: Shapes, tile: Tile, target: KernelTarget) -> dict[str, int]:
    return {**_constants(shapes, tile, target), "PROGRAMS": _PROGRAMS * target.compute_units}


def _needs(live: int) -> Any:
    def needs(shapes: Shapes, constants: Mapping[str, int], tile: Tile, element_bytes: int) -> TileNeeds:
        return TileNeeds(values=live * constants["ROWS"] * constants["BLOCK"])

    return needs


_TILES = tuple(Tile({"ELEMENTS": _ELEMENTS}, threads) for threads in (128, 256, 512, 1024))

RMS_NORM_FORWARD = Kernel(
    name="rms_norm",
    function=_forward,
    arguments={"x_ptr": "*x", "weight_ptr": "*x", "y_ptr": "*x", "rstd_ptr": "*fp32",
               "rows": "i32", "width": "i32", "eps": "fp32", "offset": "fp32"},
    grid=lambda shapes, constants: (triton.cdiv(shapes["rows"], constants["ROWS"]),),
    tiles=_TILES,
    constants=_constants,
    needs=_needs(live=3),
    example={"rows": 16384, "width": 4096},
)  # fmt: skip

RMS_NORM_BACKWARD = Kernel(
    name="rms_norm_backward",
    function=_backward,
    arguments={"gradient_ptr": "*x", "x_ptr": "*x", "weight_ptr": "*x", "rstd_ptr": "*fp32", "x_gradient_ptr": "*x",
               "sums_ptr": "*fp32", "rows": "i32", "width": "i32", "offset": "fp32"},
    grid=lambda shapes, constants: (min(constants["PROGRAMS"], triton.cdiv(shapes["rows"], constants["ROWS"])),),
    tiles=_TILES,
    constants=_backward_constants,
    needs=_needs(live=6),
    example={"rows": 16384, "width": 4096},
)  # fmt: skip


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """`x` over the root of its mean square, times `weight_D + offset`; and the reciprocal of every row's root."""
    y, rstd = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    shapes = {"rows": rstd.numel(), "width": x.shape[-1]}
    launch(RMS_NORM_FORWARD, shapes, x, x, weight_D.contiguous(), y, rstd, *shapes.values(), eps, offset)
    return y, rstd


def rms_norm_backward(
    gradient: Tensor, x: Tensor, weight_D: Tensor, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """Gradients of input and weight."""
    x_gradient, shapes = torch.empty_like(x), {"rows": rstd.numel(), "width": x.shape[-1]}
    programs = grid_of(RMS_NORM_BACKWARD, shapes, x)[0]
    sums = x.new_empty(programs, x.shape[-1], dtype=torch.float32)
    tensors = gradient, x, weight_D.contiguous(), rstd.contiguous(), x_gradient, sums
    launch(RMS_NORM_BACKWARD, shapes, x, *tensors, *shapes.values(), offset)
    return x_gradient, sums.sum(0).type_as(weight_D)
