"""The global gradient norm, whatever mesh the shards are on."""

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from danlu.torch_compat import foreach_mul_, foreach_norm


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _copies(gradient: Tensor, stage_ranks: int) -> int:
    """How many ranks of the stage hold the same shard of a gradient."""
    if not isinstance(gradient, DTensor):
        return stage_ranks
    mesh = gradient.device_mesh
    assert not any(placement.is_partial() for placement in gradient.placements)
    return stage_ranks // prod(
        mesh.size(dim) for dim, placement in enumerate(gradient.placements) if not placement.is_replicate()
    )


@torch.no_grad()
def local_squared_norm(parameters: Iterable[nn.Parameter], stage_ranks: int, device: torch.device) -> Tensor:
    """This rank's contribution to the squared norm: the sum over all ranks is the square of the global norm.

    A shard held by n ranks counts 1/n on each, so one all-reduce serves every mesh.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_copies.setdefault(_copies(parameter.grad, stage_ranks), []).append(_local(parameter.grad))
    total = torch.zeros((), dtype=torch.float32, device=device)
    for copies, gradients in by_copies.items():
        norms = torch.stack(foreach_norm(gradients, 2, dtype=torch.float32))
        total += norms.square().sum() / copies
    return total


@torch.no_grad()
def clip_grads_with_norm(parameters: Iterable[nn.Parameter], norm: float, largest: float) -> None:
    """Scale gradients down to norm `largest` if `norm` is larger; 0 disables clipping."""
    if largest == 0 or norm <= largest:
        return
    gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    foreach_mul_(gradients, largest / (norm + 1e-6))
