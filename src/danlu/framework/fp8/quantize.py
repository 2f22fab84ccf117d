"""Matrices to e4m3 with a scale for every block.

Shapes: R rows, K elements of each, along which they are multiplied and summed; C = K / block scales of a row.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.spec.recipe import MatmulFormat

E4M3_MAX = 448.0
"""The largest number of `torch.float8_e4m3fn`."""
_SMALLEST_EXPONENT = -126
"""Of a scale: a smaller one would be subnormal in fp32, which chips may take for 0."""


class Quantized(NamedTuple):
    """A matrix in e4m3 with its scales: an element times its scale is what it stands for."""

    values_RK: Tensor
    scales_RC: Tensor

    def dequantize(self, block: int) -> Tensor:
        """What the values stand for, in fp32."""
        scales_RK = self.scales_RC.float().repeat_interleave(block, dim=1)[:, : self.values_RK.shape[1]]
        return self.values_RK.float() * scales_RK


class BlockFormat(NamedTuple):
    """How a matrix is divided into blocks, and what their scales are."""

    matmul: MatmulFormat
    block: int
    native: bool = False
    """The chip multiplies it; else the product is emulated."""

    def quantize_rows(self, x_RK: Tensor) -> Quantized:
        """Blocks of 1 × `block`, as activations and gradients have them."""
        blocks = _blocks(x_RK.float(), self.block)
        scales_RC = self.scales(blocks.abs().amax(-1))
        values = to_e4m3(blocks / scales_RC[..., None]).flatten(-2)
        return Quantized(values[:, : x_RK.shape[1]].contiguous(), self._stored(scales_RC))

    def quantize_weight(self, weight_RK: Tensor) -> Quantized:
        """Blocks of `block` × `block` in fp8, so that a matrix and its transpose are the same; rows in mxfp8."""
        if self.matmul == "mxfp8":
            return self.quantize_rows(weight_RK)
        rows, width = weight_RK.shape
        columns = _blocks(weight_RK.float(), self.block).permute(1, 2, 0)  # C, block, R
        tiles = _blocks(columns, self.block)  # C, block, R / block, block
        scales = self.scales(tiles.abs().amax((1, 3)))
        values_KR = to_e4m3(tiles / scales[:, None, :, None]).flatten(-2).flatten(0, 1)
        scales_RC = scales.repeat_interleave(self.block, dim=1)[:, :rows].t()
        return Quantized(values_KR[:width, :rows].t().contiguous(), scales_RC.contiguous())

    def quantize_tokens(self, x: Tensor) -> Quantized:
        """Of activations or gradients, the transpose, in blocks of `block` consecutive tokens of one sequence.

        Weight gradients are sums over tokens. The last block of a sequence is filled up with zeros, so that no block
        reaches into the next sequence, which another rank or microbatch may hold.
        """
        x_BSR = x.unsqueeze(0) if x.ndim == 2 else x.flatten(0, -3)
        padded = F.pad(x_BSR, (0, 0, 0, -x_BSR.shape[1] % self.block))
        return self.quantize_rows(padded.flatten(0, 1).t())

    def scales(self, largest: Tensor) -> Tensor:
        """Scales of blocks by their largest magnitudes, so that these become at most 448; NaN if one is not finite."""
        smallest = 2.0**_SMALLEST_EXPONENT
        if self.matmul == "fp8":
            return (largest / E4M3_MAX).clamp(min=smallest)
        fraction, exponent = torch.frexp((largest / E4M3_MAX).clamp(min=smallest))  # fraction is in [0.5, 1)
        exponent = exponent - (fraction == 0.5).to(exponent.dtype)  # rounded up: nothing is clipped
        return torch.ldexp(torch.ones_like(largest), exponent).where(largest.isfinite(), torch.nan)

    def _stored(self, scales: Tensor) -> Tensor:
        return scales.to(torch.float8_e8m0fnu) if self.matmul == "mxfp8" else scales


def to_e4m3(x: Tensor) -> Tensor:
    """Round to the nearest, ties to even; what is larger than 448 becomes 448, and NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _blocks(x: Tensor, block: int) -> Tensor:
    """The last dim as blocks; the last block is filled up with zeros."""
    padded = F.pad(x, (0, -x.shape[-1] % block))
    return padded.view(*x.shape[:-1], padded.shape[-1] // block, block)
