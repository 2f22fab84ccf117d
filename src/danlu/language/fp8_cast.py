"""Cast rows to e4m3 with an fp32 scale for every block of their elements, in one pass over memory.

The bits are those of `ops/operators/quantize.py`: the largest magnitude of a block becomes 448, or at most 448 where
scales are powers of two; others are rounded to the nearest, ties to even. Chips without the instruction round by
arithmetic, to the same bits. Rows may be columns in memory, as for the gradient of a weight: nothing is copied before.
"""

# Triton reads the annotations of a kernel, so its parameters have none but `constexpr`.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import warnings
from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from danlu.chips.kernel_targets import KernelTarget
from danlu.language.declaration import Kernel, Shapes, Tile, TileNeeds
from danlu.language.launch import launch
from danlu.ops.operators.quantize import reference

_LARGEST: tl.constexpr = tl.constexpr(448.0)
_SMALLEST_SCALE: tl.constexpr = tl.constexpr(2.0**-126)  # a smaller one would be subnormal, which chips may take for 0


@triton.jit
def _e4m3_bits(x):
    """The byte of e4m3 nearest to each value of at most 448.

    Normal numbers keep 3 of 23 bits of their fraction, rounded to even by adding a half less one and the last bit kept;
    from 2⁻⁶ down the spacing is 2⁻⁹, and adding 2¹⁴ to the magnitude makes fp32 round to it.
    """
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    normal = rounded - (120 << 3)  # exponents begin at 2⁻⁷ instead of 2⁻¹²⁷
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.uint32, bitcast=True) & 0xFF
    value = tl.where(magnitude < (121 << 23), subnormal, normal)
    value = tl.where(magnitude > 0x7F800000, 0x7F, value)
    return (value | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _cast(
    x_ptr, values_ptr, scales_ptr, rows, width, blocks, row_stride, column_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, POWERS: tl.constexpr, BY_INSTRUCTION: tl.constexpr,
):  # fmt: skip
    """Scale and cast one block of `ROWS` rows; the scale of one with something that is not finite is not finite."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (row < rows) & (column < width)
    x = tl.load(x_ptr + row * row_stride + column * column_stride, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1, keep_dims=True)
    scale = tl.maximum(tl.div_rn(largest, tl.full([ROWS, 1], _LARGEST, tl.float32)), _SMALLEST_SCALE)
    if POWERS:  # rounded up, by a carry into the exponent
        up = (scale.to(tl.uint32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = tl.where(largest < float("inf"), up.to(tl.float32, bitcast=True), float("nan"))
    scaled = tl.div_rn(x, tl.broadcast_to(scale, [ROWS, BLOCK]))
    scaled = tl.where(scaled > _LARGEST, _LARGEST, tl.where(scaled < -_LARGEST, -_LARGEST, scaled))
    if BY_INSTRUCTION:  # noqa: SIM108  (in one line both sides would be compiled, which not every chip can)
        values = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        values = _e4m3_bits(scaled)
    tl.store(values_ptr + row * width + column, values, mask=inside)
    tl.store(scales_ptr + row * blocks + tl.program_id(1), scale, mask=row < rows)


def _constants(shapes: Shapes, tile: Tile, target: KernelTarget) -> dict[str, int]:
    by_instruction = int("e4m3" in target.formats)
    return {**tile.sizes, "BLOCK": shapes["block"], "POWERS": shapes["powers"], "BY_INSTRUCTION": by_instruction}


def _needs(shapes: Shapes, constants: Mapping[str, int], tile: Tile, element_bytes: int) -> TileNeeds:
    return TileNeeds(values=4 * constants["ROWS"] * constants["BLOCK"])


FP8_CAST = Kernel(
    name="fp8_cast",
    function=_cast,
    arguments={"x_ptr": "*x", "values_ptr": "*u8", "scales_ptr": "*fp32", "rows": "i32", "width": "i32",
               "blocks": "i32", "row_stride": "i32", "column_stride": "i32"},
    grid=lambda shapes, constants: (
        triton.cdiv(shapes["rows"], constants["ROWS"]), triton.cdiv(shapes["width"], shapes["block"])
    ),
    tiles=(Tile({"ROWS": 16}, 128),),
    constants=_constants,
    needs=_needs,
    example={"rows": 16384, "width": 4096, "block": 128, "powers": 0},
)  # fmt: skip


def fp8_cast(x_RK: Tensor, block: int = 128, powers: bool = False) -> tuple[Tensor, Tensor]:
    """Rows as e4m3, and the scale of every block: an element times its scale is what it stands for."""
    if block & (block - 1):
        warnings.warn(
            f"blocks of {block} elements are cast to fp8 by eight operators of torch: the kernel takes powers of two",
            RuntimeWarning,
            stacklevel=2,
        )
        return reference(x_RK, block, powers)
    rows, width = x_RK.shape
    blocks = triton.cdiv(width, block)
    values_RK = x_RK.new_empty(rows, width, dtype=torch.uint8)
    scales_RC = x_RK.new_empty(rows, blocks, dtype=torch.float32)
    shapes = {"rows": rows, "width": width, "block": block, "powers": int(powers)}
    launch(FP8_CAST, shapes, x_RK, x_RK, values_RK, scales_RC, rows, width, blocks, *x_RK.stride())
    return values_RK.view(torch.float8_e4m3fn), scales_RC
