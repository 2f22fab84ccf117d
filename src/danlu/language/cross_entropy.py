"""Cross-entropy of logits in their own dtype: a program has one row, and passes over its vocabulary in blocks.

Shapes: N positions, V logits of each, which may be one part of the vocabulary. Every lane keeps a maximum and a sum of
its own, and they meet once a row: no exchange between threads while logits are read.
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
def _finite(highest):
    """What is subtracted before exp: 0 where nothing but -inf was seen, whose difference would not be a number."""
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def _softmax_sums(
    logits_ptr, targets_ptr, highest_ptr, sums_ptr, target_ptr, width, first,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Highest logit of a row, sum of exp(logit - highest), and the logit at its target."""
    row = tl.program_id(0).to(tl.int64)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + row * width + column, mask=column < width, other=float("-inf")).to(tl.float32)
        above = tl.maximum(highest, logit)
        total = total * tl.exp(highest - _finite(above)) + tl.exp(logit - _finite(above))
        highest = above
    of_row = tl.max(highest, 0)
    tl.store(highest_ptr + row, of_row)
    tl.store(sums_ptr + row, tl.sum(total * tl.exp(highest - _finite(of_row)), 0))
    column = tl.load(targets_ptr + row) - first
    held = (column >= 0) & (column < width)
    tl.store(target_ptr + row, tl.load(logits_ptr + row * width + column, mask=held, other=0.0).to(tl.float32))


@triton.jit
def _backward(
    logits_ptr, targets_ptr, highest_ptr, sums_ptr, factors_ptr, gradient_ptr, width, first,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Softmax minus one at the target, times the row's factor; 0 where that is 0."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row) - first
    highest, factor = tl.load(highest_ptr + row), tl.load(factors_ptr + row)
    scale = factor / tl.load(sums_ptr + row)  # not through the sum's logarithm, which costs a large logit digits
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        place = row * width + column
        logit = tl.load(logits_ptr + place, mask=column < width, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(logit - highest) * scale - tl.where(column == target, factor, 0.0)
        gradient = tl.where(factor == 0.0, 0.0, gradient)  # 0 times what is not a number would stay that
        tl.store(gradient_ptr + place, gradient.to(gradient_ptr.dtype.element_ty), mask=column < width)


def _constants(shapes: Shapes, tile: Tile, target: KernelTarget) -> dict[str, int]:
    return {"BLOCK": min(tile.sizes["BLOCK"], power_above(shapes["width"]))}


def _needs(shapes: Shapes, constants: Mapping[str, int], tile: Tile, element_bytes: int) -> TileNeeds:
    return TileNeeds(values=4 * constants["BLOCK"])


_TILES = tuple(Tile({"BLOCK": block}, threads) for block, threads in ((4096, 512), (2048, 256), (64, 64)))
_EXAMPLE = {"rows": 8192, "width": 131072}

SOFTMAX_SUMS = Kernel(
    name="softmax_sums",
    function=_softmax_sums,
    arguments={"logits_ptr": "*x", "targets_ptr": "*i64", "highest_ptr": "*fp32", "sums_ptr": "*fp32",
               "target_ptr": "*fp32", "width": "i32", "first": "i32"},
    grid=lambda shapes, constants: (shapes["rows"],),
    tiles=_TILES,
    constants=_constants,
    needs=_needs,
    example=_EXAMPLE,
)  # fmt: skip

CROSS_ENTROPY_BACKWARD = Kernel(
    name="cross_entropy_backward",
    function=_backward,
    arguments={"logits_ptr": "*x", "targets_ptr": "*i64", "highest_ptr": "*fp32", "sums_ptr": "*fp32",
               "factors_ptr": "*fp32", "gradient_ptr": "*x", "width": "i32", "first": "i32"},
    grid=lambda shapes, constants: (shapes["rows"],),
    tiles=_TILES,
    constants=_constants,
    needs=_needs,
    example=_EXAMPLE,
)  # fmt: skip


def softmax_sums(logits_NV: Tensor, targets_N: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Highest logit of every row, sum of exp(logit - highest), and the logit at its target (0 if not held here)."""
    rows, width = logits_NV.shape
    highest_N, sums_N, target_N = (logits_NV.new_empty(rows, dtype=torch.float32) for _ in range(3))
    tensors = logits_NV, targets_N, highest_N, sums_N, target_N
    launch(SOFTMAX_SUMS, {"rows": rows, "width": width}, logits_NV, *tensors, width, first)
    return highest_N, sums_N, target_N


def cross_entropy_backward(
    logits_NV: Tensor, targets_N: Tensor, highest_N: Tensor, sums_N: Tensor, factors_N: Tensor, first: int
) -> Tensor:
    """The gradient of the logits, in their dtype."""
    rows, width = logits_NV.shape
    gradient_NV = torch.empty_like(logits_NV)
    tensors = logits_NV, targets_N, highest_N, sums_N, factors_N.float(), gradient_NV
    launch(CROSS_ENTROPY_BACKWARD, {"rows": rows, "width": width}, logits_NV, *tensors, width, first)
    return gradient_NV
