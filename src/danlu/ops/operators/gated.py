"""The product of an activated gate and its values: SwiGLU, GEGLU, and SwiGLU cut at ±7 (gpt-oss).

What it costs and saves is in `ops/mlp.py`.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.ops.operators import cpu
from danlu.ops.operators.operator import ROUNDING, Implementation, Operator, define_operator, precise

_KINDS = {"swiglu": 0, "geglu": 1, "clamped_swiglu": 2}
_CLAMP, _SLOPE = 7.0, 1.702
"""Of gpt-oss: where gate and up are cut, and the slope of its sigmoid."""


def reference(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The hidden features of a gated feed-forward network."""
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=_CLAMP), up.clamp(-_CLAMP, _CLAMP)
        return (up + 1) * (gate * torch.sigmoid(gate * _SLOPE))
    return (F.gelu(gate, approximate="tanh") if activation == "geglu" else F.silu(gate)) * up


# Where a gate is far from zero, the slope of its activation is a small difference of large terms.
GATED_PRODUCT = Operator(
    "gated_product", reference, ROUNDING | {torch.float32: 2.0**-18}, settings=(("swiglu",), ("swiglu",))
)


def gated_product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The hidden features of a gated feed-forward network, by the implementation for these tensors."""
    if torch.compiler.is_compiling():
        return reference(gate, up, activation)
    hidden: Tensor = torch.ops.danlu.gated_product(gate.contiguous(), up.contiguous(), activation)
    return hidden


def _forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """As `reference`."""
    return GATED_PRODUCT.implementation(gate).forward(gate.contiguous(), up.contiguous(), activation)


def _backward(gradient: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up: the activation is computed again instead of kept."""
    run = GATED_PRODUCT.implementation(gate).backward
    return run(gradient.contiguous(), gate.contiguous(), up.contiguous(), activation)


def _forward_fake(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return up.new_empty(up.shape)


def _backward_fake(gradient: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    gate, up, ctx.activation = inputs
    ctx.save_for_backward(gate, up)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    inputs = gradient.contiguous(), *ctx.saved_tensors, ctx.activation
    return *torch.ops.danlu.gated_product_backward(*inputs), None


define_operator(
    "gated_product",
    "(Tensor gate, Tensor up, str activation) -> Tensor",
    _forward,
    _forward_fake,
    _save,
    _differentiate,
)
define_operator(
    "gated_product_backward",
    "(Tensor gradient, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
)


def _torch_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return reference(gate, up, activation)


def _torch_backward(gradient: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    wide_gate, wide_up, given = (each.to(precise(gate.dtype)) for each in (gate, up, gradient))
    if activation == "geglu":  # x (1 + tanh u) / 2 is x sigmoid(2u)
        inner = 2 * math.sqrt(2 / math.pi) * (wide_gate + 0.044715 * wide_gate**3)
        steepness = 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * wide_gate**2)
    else:
        steepness = wide_gate.new_tensor(_SLOPE if activation == "clamped_swiglu" else 1.0)
        if activation == "clamped_swiglu":
            wide_gate, wide_up = wide_gate.clamp(max=_CLAMP), wide_up.clamp(-_CLAMP, _CLAMP) + 1
        inner = steepness * wide_gate
    share = torch.sigmoid(inner)
    gate_gradient = given * wide_up * (share + wide_gate * steepness * share * (1 - share))
    up_gradient = given * wide_gate * share
    if activation == "clamped_swiglu":
        gate_gradient, up_gradient = gate_gradient * (gate <= _CLAMP), up_gradient * (up.abs() <= _CLAMP)
    return gate_gradient.type_as(gate), up_gradient.type_as(up)


def _native_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    y = torch.empty_like(up)
    cpu.call("gated", gate, gate, up, y, y.numel(), _KINDS[activation])
    return y


def _native_backward(gradient: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    gate_gradient, up_gradient = torch.empty_like(gate), torch.empty_like(up)
    tensors = gradient, gate, up, gate_gradient, up_gradient
    cpu.call("gated_backward", gate, *tensors, gate.numel(), _KINDS[activation])
    return gate_gradient, up_gradient


GATED_PRODUCT.implementations += [
    Implementation("torch", _torch_forward, _torch_backward, "in operators of torch"),
    cpu.native(_native_forward, _native_backward),
]
