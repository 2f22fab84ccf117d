"""Inputs that tensor parallelism gathers, gathered again in the backward pass instead of kept.

With sequence parallelism a rank holds S/tp positions, and the matrices of a block that are sharded by columns need all
of them. Autograd would keep the gathered input for the weights' gradients: `tp` times the shard. Here the shard is
kept, and the first of the block's matrices whose gradient is computed gathers it for all of them (Korthikanti et al.,
"Reducing activation recomputation in large transformer models", 2022, section 4.2.2).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from danlu.torch_compat import is_gradient_wanted


def apply_regather(module: nn.Module, columns: Mapping[str, nn.Module], mesh: DeviceMesh) -> None:
    """Gather the first input of `module` over `mesh` for its matrices `columns`, sharded by outputs.

    Only the matrices' saved inputs are freed: `module` must pass its first input to them unchanged, and to nothing else
    that keeps it.
    """
    current = _GatheredInput(mesh)
    module.register_forward_pre_hook(lambda _, inputs: (current.begin(inputs[0]), *inputs[1:]))
    module.register_forward_hook(lambda *_: current.end())
    for name, column in columns.items():
        if not isinstance(column, nn.Linear):
            raise TypeError(f"`{name}` must be an nn.Linear to be sharded by outputs, but is {type(column).__name__}")
        for key, parameter in list(column.named_parameters()):
            sharded = distribute_tensor(parameter, mesh, [Shard(0)])
            column.register_parameter(key, nn.Parameter(sharded, parameter.requires_grad))
        column.forward = partial(_multiply, name, column, current)  # type: ignore[method-assign]


class _GatheredInput:
    """The gathered input of the forward pass that runs, for all matrices that read it."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.full: Tensor | None = None
        self.regathered = _RegatheredInput(mesh)

    def begin(self, shard: Tensor) -> Tensor:
        self.shard = shard.detach()
        self.full = _gather(shard, self.mesh)
        self.regathered = _RegatheredInput(self.mesh)  # microbatches of a pipeline are in flight together
        return self.full

    def end(self) -> None:
        self.full = None
        del self.shard


class _RegatheredInput:
    """The same input in its backward pass: gathered by the first matrix that asks for it, freed by the last."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.users = self.left = 0
        self.full: Tensor | None = None

    def get(self, shard: Tensor) -> Tensor:
        full = self.full
        if full is None:
            full, self.left = _gather(shard, self.mesh), self.users
        self.left -= 1
        self.full = full if self.left else None
        return full


def _gather(shard: Tensor, mesh: DeviceMesh) -> Tensor:
    """All positions; the gradient is summed over ranks and scattered."""
    sharded = DTensor.from_local(shard, mesh, [Shard(1)])
    return sharded.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _local(parameter: Tensor | None) -> Tensor | None:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _multiply(name: str, column: nn.Linear, current: _GatheredInput, x_BSD: Tensor) -> Tensor:
    """The forward of a matrix that is sharded by outputs."""
    if x_BSD is not current.full:
        raise RuntimeError(
            f"`{name}` must get the gathered input of its block unchanged, since its backward pass gathers that again; "
            "`regather_inputs = false` in the plan keeps what it gets"
        )
    product: Tensor = _ColumnLinear.apply(
        x_BSD, current.shard, _local(column.weight), _local(column.bias), current.regathered
    )
    return product


class _ColumnLinear(torch.autograd.Function):
    """A linear layer whose backward pass gathers its input again.

    Shapes: N positions of the microbatch, D inputs, F outputs of this rank.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shard: Tensor, weight_FD: Tensor, bias_F: Tensor | None, regathered: _RegatheredInput
    ) -> Tensor:
        ctx.save_for_backward(shard, weight_FD)
        ctx.regathered = regathered
        if ctx.needs_input_grad[2]:
            regathered.users += 1
        return F.linear(x, weight_FD, bias_F)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shard, weight_FD = ctx.saved_tensors
        needed, edges = ctx.needs_input_grad, ctx.next_functions
        of_input, of_weight, of_bias = (needed[i] and is_gradient_wanted(edges[i][0]) for i in (0, 2, 3))
        grad_NF = grads[0].flatten(0, -2)
        grad_x = (grad_NF @ weight_FD).unflatten(0, grads[0].shape[:-1]) if of_input else None
        grad_FD = grad_NF.t() @ ctx.regathered.get(shard).flatten(0, -2) if of_weight else None
        return grad_x, None, grad_FD, grad_NF.sum(0) if of_bias else None, None
