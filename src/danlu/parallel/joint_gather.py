"""Several inputs of a block gathered in one collective, for matrices that are sharded by outputs.

Latent attention reads its hidden states on the shard of the sequence, and only narrow projections of them need all
positions: they are gathered side by side. Every rank uses them for its own heads, so their gradient is a sum over
ranks, scattered again by sequence in one collective.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


def apply_joint_gather(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let `module` return its inputs gathered over `mesh` along the sequence, its second dimension."""
    module.forward = partial(_gather_jointly, mesh)


def apply_joint_column(column: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a matrix by outputs whose input comes from a joint gather: the gradient of that is left a sum to come."""
    if not isinstance(column, nn.Linear):
        raise TypeError(f"a matrix sharded by outputs must be an nn.Linear, but is {type(column).__name__} instead")
    for key, parameter in list(column.named_parameters()):
        sharded = distribute_tensor(parameter, mesh, [Shard(0)])
        column.register_parameter(key, nn.Parameter(sharded, parameter.requires_grad))
    column.forward = partial(_multiply, column)  # type: ignore[method-assign]


def _gather_jointly(mesh: DeviceMesh, *parts_BS: Tensor) -> tuple[Tensor, ...]:
    sharded = DTensor.from_local(torch.cat(parts_BS, dim=-1), mesh, [Shard(1)])
    full = sharded.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return full.split([part.shape[-1] for part in parts_BS], dim=-1)


def _multiply(column: nn.Linear, x: Tensor) -> Tensor:
    weight, bias = column.weight, column.bias
    assert isinstance(weight, DTensor)
    return F.linear(x, weight.to_local(), bias.to_local() if isinstance(bias, DTensor) else None)
