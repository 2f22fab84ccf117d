"""RMS norm. What it costs and saves is in `ops/norm.py`.

Shapes: ... leading dims, D features.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from danlu.ops.operators import cpu
from danlu.ops.operators.operator import ROUNDING, Implementation, Operator, define_operator, precise


def reference(x: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """`x` over the root of its mean square, times `weight_D + offset`; computed in fp32 or, of fp64, in fp64."""
    scale_D = weight_D if offset == 0.0 else weight_D.to(precise(x.dtype)) + offset
    if scale_D.dtype == x.dtype:
        return F.rms_norm(x, tuple(weight_D.shape), scale_D, eps)
    return F.rms_norm(x.to(scale_D.dtype), tuple(weight_D.shape), scale_D, eps).type_as(x)


RMS_NORM = Operator("rms_norm", reference, ROUNDING, settings=((1e-6, 0.0), (0.0,)), whole_inputs=((1,), (2,)))


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """`x` over the root of its mean square along the last dim, times `weight_D + offset`."""
    if torch.compiler.is_compiling():
        return reference(x, weight_D, eps, offset)
    y, _ = torch.ops.danlu.rms_norm(x.contiguous(), weight_D, eps, offset)  # a copy that a dry run sees
    return y


def _forward(x: Tensor, weight_D: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """The norm, and the reciprocal root of every row's mean square."""
    return RMS_NORM.implementation(x).forward(x.contiguous(), weight_D, eps, offset)


def _backward(gradient: Tensor, x: Tensor, weight_D: Tensor, rstd: Tensor, offset: float) -> tuple[Tensor, Tensor]:
    """Gradients of input and weight."""
    return RMS_NORM.implementation(x).backward(gradient.contiguous(), x.contiguous(), weight_D, rstd, offset)


def _forward_fake(x: Tensor, weight_D: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=precise(x.dtype))


def _backward_fake(gradient: Tensor, x: Tensor, weight_D: Tensor, rstd: Tensor, offset: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight_D.new_empty(weight_D.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, float, float], output: tuple[Tensor, Tensor]) -> None:
    x, weight_D, _, ctx.offset = inputs
    ctx.save_for_backward(x, weight_D, output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
    x, weight_D, rstd = ctx.saved_tensors
    return *torch.ops.danlu.rms_norm_backward(gradient.contiguous(), x, weight_D, rstd, ctx.offset), None, None


define_operator(
    "rms_norm",
    "(Tensor x, Tensor weight, float eps, float offset) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    _save,
    _differentiate,
)
define_operator(
    "rms_norm_backward",
    "(Tensor gradient, Tensor x, Tensor weight, Tensor rstd, float offset) -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
)


# Every row alone: any dim but the last may be sharded, and the weight's gradient is then a sum over ranks.
@register_sharding(torch.ops.danlu.rms_norm.default)  # type: ignore[untyped-decorator]
def _(x: Any, *_: object) -> list[Any]:
    kept = [([Shard(dim)] * 2, [Shard(dim), Replicate(), None, None]) for dim in range(x.ndim - 1)]
    return [([Replicate()] * 2, [Replicate(), Replicate(), None, None]), *kept]


@register_sharding(torch.ops.danlu.rms_norm_backward.default)  # type: ignore[untyped-decorator]
def _(gradient: Any, *_: object) -> list[Any]:
    whole: Any = ([Replicate()] * 2, [Replicate()] * 4 + [None])
    kept = [
        ([Shard(dim), Partial()], [Shard(dim), Shard(dim), Replicate(), Shard(dim), None])
        for dim in range(gradient.ndim - 1)
    ]
    return [whole, *kept]


def _torch_forward(x: Tensor, weight_D: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    wide = x.to(precise(x.dtype))
    rstd = (wide.square().mean(-1) + eps).rsqrt()
    return (wide * rstd[..., None] * (weight_D.to(wide.dtype) + offset)).type_as(x), rstd


def _torch_backward(
    gradient: Tensor, x: Tensor, weight_D: Tensor, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    normed, given = x.to(rstd.dtype) * rstd[..., None], gradient.to(rstd.dtype)
    scaled = given * (weight_D.to(rstd.dtype) + offset)
    x_gradient = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * rstd[..., None]
    return x_gradient.type_as(x), (given * normed).flatten(0, -2).sum(0).type_as(weight_D)


def _native_forward(x: Tensor, weight_D: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    y, rstd = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    cpu.call("rms_norm", x, x, _scale(weight_D, offset), y, rstd, rstd.numel(), x.shape[-1], eps)
    return y, rstd


def _native_backward(
    gradient: Tensor, x: Tensor, weight_D: Tensor, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    x_gradient, sums = torch.empty_like(x), torch.zeros(cpu.threads_for(x), len(weight_D))
    scale_D = _scale(weight_D, offset)
    cpu.call("rms_norm_backward", x, gradient, x, scale_D, rstd, x_gradient, sums, rstd.numel(), x.shape[-1])
    return x_gradient, sums.sum(0).type_as(weight_D)


def _scale(weight_D: Tensor, offset: float) -> Tensor:
    scale_D = weight_D.float()
    return (scale_D + offset if offset else scale_D).contiguous()


RMS_NORM.implementations += [
    Implementation("torch", _torch_forward, _torch_backward, "in operators of torch"),
    cpu.native(_native_forward, _native_backward),
]
