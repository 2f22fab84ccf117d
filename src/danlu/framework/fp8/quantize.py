"""Matrices to e4m3 with a scale for every block.

Shapes: R rows, K elements of each, along which they are multiplied and summed; C = K / block scales of a row.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.ops.operators.quantize import as_blocks, block_scales, quantize_rows, to_e4m3
from danlu.spec.recipe import MatmulFormat


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
        values, scales = quantize_rows(x_RK, self.block, self._powers)
        return Quantized(values, self._stored(scales))

    def quantize_weight(self, weight_RK: Tensor) -> Quantized:
        """Blocks of `block` × `block` in fp8, so that a matrix and its transpose are the same; rows in mxfp8."""
        if self._powers:
            return self.quantize_rows(weight_RK)
        rows, width = weight_RK.shape
        columns = as_blocks(weight_RK.float(), self.block).permute(1, 2, 0)  # C, block, R
        tiles = as_blocks(columns, self.block)  # C, block, R / block, block
        scales = block_scales(tiles.abs().amax((1, 3)), self._powers)
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

    @property
    def _powers(self) -> bool:
        """Scales are powers of two."""
        return self.matmul == "mxfp8"

    def _stored(self, scales: Tensor) -> Tensor:
        return scales.to(torch.float8_e8m0fnu) if self._powers else scales
