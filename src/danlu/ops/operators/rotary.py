"""Rotation of pairs of features by their positions' angles.

Shapes: B sequences, S tokens of each, H heads, W width of a head. What it costs and saves is in `ops/attention.py`.
"""

from typing import Any

import torch
from torch import Tensor

from danlu.ops.operators import cpu
from danlu.ops.operators.operator import ROUNDING, Implementation, Operator, define_operator


def reference(x_BSHW: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves (a, b) of every head's features become (a cos - b sin, b cos + a sin), in the dtype of the tables.

    Tables are (S, W/2) or (B, S, W/2).
    """
    first, second = x_BSHW.to(cos.dtype).chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x_BSHW)


ROTATE = Operator("rotate", reference, ROUNDING)


def rotate(x_BSHW: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of features, one of either half, by angles of which cosine and sine are given, in fp32."""
    if torch.compiler.is_compiling():
        return reference(x_BSHW, cos, sin)
    turned: Tensor = torch.ops.danlu.rotate(x_BSHW.contiguous(), cos, sin)
    return turned


def _forward(x_BSHW: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `reference`."""
    return ROTATE.implementation(x_BSHW).forward(x_BSHW.contiguous(), cos.contiguous(), sin.contiguous())


def _backward(gradient_BSHW: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation back."""
    run = ROTATE.implementation(gradient_BSHW).backward
    return run(gradient_BSHW.contiguous(), cos.contiguous(), sin.contiguous())


def _fake(x_BSHW: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x_BSHW.new_empty(x_BSHW.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _differentiate(ctx: Any, gradient_BSHW: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.danlu.rotate_backward(gradient_BSHW.contiguous(), *ctx.saved_tensors), None, None


define_operator("rotate", "(Tensor x, Tensor cos, Tensor sin) -> Tensor", _forward, _fake, _save, _differentiate)
define_operator("rotate_backward", "(Tensor gradient, Tensor cos, Tensor sin) -> Tensor", _backward, _fake)


def _torch_backward(gradient_BSHW: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return reference(gradient_BSHW, cos, -sin)


def _native(x_BSHW: Tensor, cos: Tensor, sin: Tensor, direction: float = 1.0) -> Tensor:
    y_BSHW, half, heads = torch.empty_like(x_BSHW), cos.shape[-1], x_BSHW.shape[2]
    rows, positions = x_BSHW.shape[0] * x_BSHW.shape[1], cos.numel() // half
    cpu.call("rotate", x_BSHW, x_BSHW, cos.float(), sin.float(), y_BSHW, rows, positions, heads, half, direction)
    return y_BSHW


def _native_backward(gradient_BSHW: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _native(gradient_BSHW, cos, sin, -1.0)


ROTATE.implementations += [
    Implementation("torch", reference, _torch_backward, "in operators of torch"),
    cpu.native(_native, _native_backward),
]
