"""What a step was like, over all ranks."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from danlu.comm.mesh import Mesh
from danlu.framework.moe import Router
from danlu.framework.state import TrainState
from danlu.parallel.norm import local_square_sum


@dataclass(frozen=True)
class StepMeasures:
    """Global figures of one step, the same on every rank."""

    loss: float
    norm: float
    memory: int
    imbalance: float | None
    stop: bool
    """A rank was asked to stop."""


def measure_step(state: TrainState, mesh: Mesh, loss: Tensor, memory: int, stop: bool) -> StepMeasures:
    """Add up the ranks' shares of loss and squared norm, and even the experts' load: three small all-reduces."""
    imbalance, layers = _balance_experts(state, mesh)
    stage_ranks = mesh.plan.degrees.stage
    shares = torch.stack(
        [
            loss.float() / mesh.size("tp"),  # ranks of one tp group computed the same loss
            local_square_sum(state.parameters(), stage_ranks, mesh.device),
            torch.tensor(imbalance / stage_ranks, device=mesh.device),
            torch.tensor(layers / stage_ranks, device=mesh.device),
            torch.tensor(float(stop), device=mesh.device),
        ]
    )
    largest = torch.tensor(float(memory), dtype=torch.float64)
    if mesh.plan.degrees.world > 1:
        dist.all_reduce(shares)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    total_loss, square, imbalance, layers, stops = shares.tolist()
    return StepMeasures(
        loss=total_loss,
        norm=square**0.5,
        memory=int(largest),
        imbalance=imbalance / layers if layers else None,
        stop=stops > 0,
    )


def _balance_experts(state: TrainState, mesh: Mesh) -> tuple[float, int]:
    """Give every router its global load; the sum of their imbalances, and how many there are."""
    routers = [module for part in state.parts for module in part.modules() if isinstance(module, Router)]
    if not routers:
        return 0.0, 0
    loads = torch.stack([router.load_E for router in routers])
    if group := mesh.group("replicate", "shard", "cp", "tp"):
        dist.all_reduce(loads, group=group)
    return sum(router.balance(load) for router, load in zip(routers, loads, strict=True)), len(routers)
