"""Products of block-scaled fp8 matrices: by the chip where it has them, else emulated with the same numbers.

The emulation defines the numbers. The products of one block are summed exactly and rounded to fp32 once, scaled by both
blocks' scales, and added to the other blocks' in order, in fp32.
"""

from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_ROWS = 16
"""Chips multiply matrices whose sizes are multiples of this; rows of zeros are added."""


@torch.library.custom_op("danlu::block_scaled_mm", mutates_args=())
def block_scaled_mm(
    a_MK: Tensor, a_scales: Tensor, b_NK: Tensor, b_scales: Tensor, block: int, dtype: torch.dtype, native: bool
) -> Tensor:
    """`a` times the transpose of `b`: both e4m3, each with a scale for every row and `block` elements of it.

    One operator, so that recompute keeps its result, a dry run counts its FLOPs, and a compiler leaves it alone.
    `native` multiplies on the chip, which must have the format (`native_formats`).
    """
    if native:
        return _multiply_on_chip(a_MK, a_scales, b_NK, b_scales, block, dtype)
    return _emulate(a_MK, a_scales, b_NK, b_scales, block, dtype)


@block_scaled_mm.register_fake
def _(
    a_MK: Tensor, a_scales: Tensor, b_NK: Tensor, b_scales: Tensor, block: int, dtype: torch.dtype, native: bool
) -> Tensor:
    return a_MK.new_empty(a_MK.shape[0], b_NK.shape[0], dtype=dtype)


@register_flop_formula(torch.ops.danlu.block_scaled_mm)
def _count_flops(a_shape: list[int], a_scales: object, b_shape: list[int], *_: object, **__: object) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[0]


def _emulate(a_MK: Tensor, a_scales: Tensor, b_NK: Tensor, b_scales: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    # Products of e4m3 are multiples of 2⁻¹⁸ below 2¹⁸: fp64 sums thousands of them without rounding, in any order.
    # Accelerators may have no fp64 matmul to speak of; their fp32 rounds the last bit of a block's sum.
    exact = torch.float64 if a_MK.device.type == "cpu" else torch.float32
    a, b = a_MK.to(exact), b_NK.to(exact)
    a_scales, b_scales = a_scales.float(), b_scales.float()
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    for number in range(a_scales.shape[1]):
        columns = slice(number * block, (number + 1) * block)
        product = (a[:, columns] @ b[:, columns].t()).float()
        total += product * (a_scales[:, number, None] * b_scales[None, :, number])
    return total.to(dtype)


def _multiply_on_chip(
    a_MK: Tensor, a_scales: Tensor, b_NK: Tensor, b_scales: Tensor, block: int, dtype: torch.dtype
) -> Tensor:
    """By `torch.nn.functional.scaled_mm`. Written from its documentation; it has not run on a chip yet."""
    m, n = a_MK.shape[0], b_NK.shape[0]
    a, b = _pad(a_MK, _ROWS, block), _pad(b_NK, _ROWS, block)
    if a_scales.dtype == torch.float8_e8m0fnu:
        recipe, swizzle = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
        scales = swizzle_scales(_pad(a_scales, _ROWS, 1)), swizzle_scales(_pad(b_scales, _ROWS, 1))
    else:
        recipe, swizzle = F.ScalingType.BlockWise1x128, F.SwizzleType.NO_SWIZZLE
        # One scale for every row and 128 elements, rows contiguous in memory, for both.
        scales = (_pad(a_scales, _ROWS, 1).t().contiguous().t(), _pad(b_scales, _ROWS, 1).t().contiguous().t())
    product = F.scaled_mm(
        a, b.t(), scales[0], recipe, scales[1], recipe, swizzle_a=swizzle, swizzle_b=swizzle, output_dtype=dtype
    )
    return product[:m, :n]


def swizzle_scales(scales_RC: Tensor) -> Tensor:
    """Scales of one byte in the order in which the chip reads them: tiles of 128 rows by 4 columns.

    In a tile, row r and column c are at 16 (r mod 32) + 4 (r div 32) + c (cuBLAS, "1D block scaling factors layout").
    """
    padded = _pad(scales_RC, 128, 4)
    tiles = padded.view(torch.uint8).unflatten(0, (-1, 4, 32)).unflatten(-1, (-1, 4))  # row tile, 4, 32, column tile, 4
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(-1).view(scales_RC.dtype)


def _pad(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Zeros added until both sizes are multiples."""
    right, below = (-matrix.shape[1]) % columns, (-matrix.shape[0]) % rows
    if not right and not below:
        return matrix
    if matrix.element_size() > 1:
        return F.pad(matrix, (0, right, 0, below))
    return F.pad(matrix.view(torch.uint8), (0, right, 0, below)).view(matrix.dtype)  # 0 is a byte of zeros


def scales_per_row(width: int, block: int) -> int:
    """Scales of a row: the last block may be shorter."""
    return ceil(width / block)
