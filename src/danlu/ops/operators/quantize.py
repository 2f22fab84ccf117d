"""Rows as e4m3 with a scale for every block of them, for block-scaled products.

Shapes: R rows, K elements of each, along which they are multiplied and summed; C = K / block scales of a row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.ops.operators.operator import Implementation, Operator, define_operator, no_gradient

E4M3_MAX = 448.0
"""The largest number of `torch.float8_e4m3fn`."""
SMALLEST_SCALE = 2.0**-126
"""A smaller one would be subnormal in fp32, which chips may take for 0."""


def reference(x_RK: Tensor, block: int, powers: bool) -> tuple[Tensor, Tensor]:
    """Elements over the scale of their block, and scales in fp32; with `powers`, these are powers of two."""
    blocks = as_blocks(x_RK.float(), block)
    scales_RC = block_scales(blocks.abs().amax(-1), powers)
    values = to_e4m3(blocks / scales_RC[..., None]).flatten(-2)
    return values[:, : x_RK.shape[1]].contiguous(), scales_RC


def block_scales(largest: Tensor, powers: bool) -> Tensor:
    """Scales of blocks by their largest magnitudes, so that these become at most 448; not finite where one is not."""
    scales = (largest / E4M3_MAX).clamp(min=SMALLEST_SCALE)
    if not powers:
        return scales
    fraction, exponent = torch.frexp(scales)  # fraction is in [0.5, 1)
    exponent = exponent - (fraction == 0.5).to(exponent.dtype)  # rounded up: nothing is clipped
    return torch.ldexp(torch.ones_like(largest), exponent).where(largest.isfinite(), torch.nan)


def to_e4m3(x: Tensor) -> Tensor:
    """Round to the nearest, ties to even; what is larger than 448 becomes 448, and NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def as_blocks(x: Tensor, block: int) -> Tensor:
    """The last dim as blocks; the last block is filled up with zeros."""
    padded = F.pad(x, (0, -x.shape[-1] % block))
    return padded.view(*x.shape[:-1], padded.shape[-1] // block, block)


# Every implementation has to give the same bits: a run that goes on with another one goes on as it would have.
QUANTIZE_ROWS = Operator(
    "quantize_rows",
    reference,
    dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), 0.0),
    settings=((128, False), ()),
)


def quantize_rows(x_RK: Tensor, block: int, powers: bool) -> tuple[Tensor, Tensor]:
    """As `reference`, by the implementation for this tensor, whose rows may be columns in memory."""
    if torch.compiler.is_compiling():
        return reference(x_RK, block, powers)
    values, scales = torch.ops.danlu.quantize_rows(x_RK, block, powers)
    return values, scales


def _forward(x_RK: Tensor, block: int, powers: bool) -> tuple[Tensor, Tensor]:
    """As `reference`."""
    values, scales = QUANTIZE_ROWS.implementation(x_RK).forward(x_RK, block, powers)
    return values, scales


def _fake(x_RK: Tensor, block: int, powers: bool) -> tuple[Tensor, Tensor]:
    rows, width = x_RK.shape
    scales = x_RK.new_empty(rows, -(-width // block), dtype=torch.float32)
    return x_RK.new_empty(rows, width, dtype=torch.float8_e4m3fn), scales


define_operator("quantize_rows", "(Tensor x, int block, bool powers) -> (Tensor, Tensor)", _forward, _fake)

QUANTIZE_ROWS.implementations.append(
    Implementation("torch", reference, no_gradient, "by eight operators of torch, most of them in fp32")
)
