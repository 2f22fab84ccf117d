"""The product of an activated gate and its values: SwiGLU, GEGLU (tanh), and SwiGLU cut at ±7 (gpt-oss).

The tanh form of GELU is g σ(2z) with z = √(2/π) (g + 0.044715 g³): no tanh, and nothing cancels for negative gates.
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
from danlu.language.declaration import Kernel, Shapes, Tile, TileNeeds
from danlu.language.launch import launch

KINDS = {"swiglu": 0, "geglu": 1, "clamped_swiglu": 2}

_CLAMP: tl.constexpr = tl.constexpr(7.0)
_SLOPE: tl.constexpr = tl.constexpr(1.702)
_TWICE_ROOT: tl.constexpr = tl.constexpr(1.5957691216057308)  # 2 √(2/π)
_CUBIC: tl.constexpr = tl.constexpr(0.044715)
_FLAT: tl.constexpr = tl.constexpr(12.0)  # beyond it σ(2z) is 0 or 1 in fp32, and its slope 0


@triton.jit
def _activate(gate, KIND: tl.constexpr):
    """The share of a gate that passes, and its derivative by the gate."""
    if KIND == 1:
        share = tl.sigmoid((gate + gate * gate * gate * _CUBIC) * _TWICE_ROOT)
        bent = tl.minimum(tl.abs(gate), _FLAT)  # the cube of a large gate would be infinite, and times 0 not a number
        slope = share * (1.0 - share) * ((bent * bent * (3.0 * _CUBIC) + 1.0) * _TWICE_ROOT)
    else:
        steep: tl.constexpr = 1.0 if KIND == 0 else _SLOPE
        share = tl.sigmoid(gate * steep)
        slope = share * (1.0 - share) * steep
    return share, slope


@triton.jit
def _clamp(gate, up, KIND: tl.constexpr):
    """Cut gate and up where the kind does; comparisons, because a minimum would drop what is not a number."""
    if KIND == 2:
        gate = tl.where(gate > _CLAMP, _CLAMP, gate)
        up = tl.where(up > _CLAMP, _CLAMP, tl.where(up < -_CLAMP, -_CLAMP, up)) + 1.0
    return gate, up


@triton.jit
def _forward(gate_ptr, up_ptr, y_ptr, elements, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """The product of one block."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < elements
    gate = tl.load(gate_ptr + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + place, mask=inside, other=0.0).to(tl.float32)
    gate, up = _clamp(gate, up, KIND)
    share, _ = _activate(gate, KIND)
    tl.store(y_ptr + place, (gate * share * up).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    gradient_ptr, gate_ptr, up_ptr, gate_gradient_ptr, up_gradient_ptr, elements,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Both gradients of one block; the activation is computed again."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < elements
    gradient = tl.load(gradient_ptr + place, mask=inside, other=0.0).to(tl.float32)
    raw_gate = tl.load(gate_ptr + place, mask=inside, other=0.0).to(tl.float32)
    raw_up = tl.load(up_ptr + place, mask=inside, other=0.0).to(tl.float32)
    gate, up = _clamp(raw_gate, raw_up, KIND)
    share, slope = _activate(gate, KIND)
    gate_gradient = gradient * up * (share + gate * slope)
    up_gradient = gradient * gate * share
    if KIND == 2:
        gate_gradient = tl.where(raw_gate > _CLAMP, 0.0, gate_gradient)
        up_gradient = tl.where(tl.abs(raw_up) > _CLAMP, 0.0, up_gradient)
    tl.store(gate_gradient_ptr + place, gate_gradient.to(gate_gradient_ptr.dtype.element_ty), mask=inside)
    tl.store(up_gradient_ptr + place, up_gradient.to(up_gradient_ptr.dtype.element_ty), mask=inside)


def _constants(shapes: Shapes, tile: Tile, target: KernelTarget) -> dict[str, int]:
    return {**tile.sizes, "KIND": shapes["kind"]}


def _needs(shapes: Shapes, constants: Mapping[str, int], tile: Tile, element_bytes: int) -> TileNeeds:
    return TileNeeds(values=8 * constants["BLOCK"])


_TILES = Tile({"BLOCK": 2048}, 128), Tile({"BLOCK": 1024}, 128)
_SHARED: dict[str, Any] = {
    "grid": lambda shapes, constants: (triton.cdiv(shapes["elements"], constants["BLOCK"]),),
    "tiles": _TILES,
    "constants": _constants,
    "needs": _needs,
    "example": {"elements": 16384 * 14336, "kind": KINDS["geglu"]},
}

GATED_FORWARD = Kernel(
    name="gated_product",
    function=_forward,
    arguments={"gate_ptr": "*x", "up_ptr": "*x", "y_ptr": "*x", "elements": "i64"},
    **_SHARED,
)

GATED_BACKWARD = Kernel(
    name="gated_product_backward",
    function=_backward,
    arguments={"gradient_ptr": "*x", "gate_ptr": "*x", "up_ptr": "*x", "gate_gradient_ptr": "*x",
               "up_gradient_ptr": "*x", "elements": "i64"},
    **_SHARED,
)  # fmt: skip


def gated_product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The hidden features of a gated feed-forward network."""
    y, shapes = torch.empty_like(up), {"elements": up.numel(), "kind": KINDS[activation]}
    launch(GATED_FORWARD, shapes, gate, gate, up, y, up.numel())
    return y


def gated_product_backward(gradient: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    gate_gradient, up_gradient = torch.empty_like(gate), torch.empty_like(up)
    shapes = {"elements": up.numel(), "kind": KINDS[activation]}
    launch(GATED_BACKWARD, shapes, gate, gradient, gate, up, gate_gradient, up_gradient, up.numel())
    return gate_gradient, up_gradient
