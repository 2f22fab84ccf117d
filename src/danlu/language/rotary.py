"""Rotation of pairs of features by their positions' angles; backward is the rotation back.

Shapes: B sequences, S tokens of each, H heads, W width of a head. A program has some heads of one token.
"""

# Triton reads the annotations of a kernel, so its parameters have none but `constexpr`.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from danlu.chips.kernel_targets import KernelTarget
from danlu.language.declaration import Kernel, Shapes, Tile, TileNeeds, power_above
from danlu.language.launch import launch


@triton.jit
def _rotate(
    x_ptr, cos_ptr, sin_ptr, y_ptr, positions, heads, half, direction,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Halves (a, b) become (a cos - b sin, b cos + a sin); `direction` -1 turns them back."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    feature = tl.arange(0, HALF)[None, :]
    angle = (token % positions) * half + feature
    cos = tl.load(cos_ptr + angle, mask=feature < half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=feature < half, other=0.0).to(tl.float32) * direction
    inside = (head < heads) & (feature < half)
    place = (token * heads + head) * (2 * half) + feature
    a = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + place + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + place, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(y_ptr + place + half, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=inside)


def _constants(shapes: Shapes, tile: Tile, target: KernelTarget) -> dict[str, int]:
    half = power_above(shapes["half"])
    return {"HEADS": min(power_above(shapes["heads"]), max(1, tile.sizes["ELEMENTS"] // half)), "HALF": half}


def _needs(shapes: Shapes, constants: Mapping[str, int], tile: Tile, element_bytes: int) -> TileNeeds:
    return TileNeeds(values=6 * constants["HEADS"] * constants["HALF"])


ROTATE = Kernel(
    name="rotate",
    function=_rotate,
    arguments={"x_ptr": "*x", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "y_ptr": "*x", "positions": "i32",
               "heads": "i32", "half": "i32", "direction": "fp32"},
    grid=lambda shapes, constants: (shapes["tokens"], triton.cdiv(shapes["heads"], constants["HEADS"])),
    tiles=(Tile({"ELEMENTS": 1024}, 128), Tile({"ELEMENTS": 1024}, 256)),
    constants=_constants,
    needs=_needs,
    example={"tokens": 16384, "heads": 32, "half": 64},
)  # fmt: skip


def rotate(x_BSHW: Tensor, cos: Tensor, sin: Tensor, direction: float = 1.0) -> Tensor:
    """Rotate pairs of features, one of either half; tables are (S, W/2) or (B, S, W/2)."""
    y_BSHW, half, heads = torch.empty_like(x_BSHW), cos.shape[-1], x_BSHW.shape[2]
    shapes = {"tokens": x_BSHW.shape[0] * x_BSHW.shape[1], "heads": heads, "half": half}
    tables = cos.float().contiguous(), sin.float().contiguous()
    launch(ROTATE, shapes, x_BSHW, x_BSHW, *tables, y_BSHW, cos.numel() // half, heads, half, direction)
    return y_BSHW


def rotate_backward(gradient_BSHW: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation back."""
    return rotate(gradient_BSHW, cos, sin, -1.0)
