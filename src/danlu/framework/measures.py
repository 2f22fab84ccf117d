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
    """The step's figures over all ranks."""
    shares, largest = reduce_measures(state, mesh, loss, memory, stop)
    total_loss, square, total_uneven, total_layers, stops = shares.tolist()
    return StepMeasures(
        loss=total_loss,
        norm=square**0.5,
        memory=int(largest),
        imbalance=total_uneven / total_layers if total_layers else None,
        stop=stops > 0,
    )


def reduce_measures(state: TrainState, mesh: Mesh, loss: Tensor, memory: int, stop: bool) -> tuple[Tensor, Tensor]:
    """Add up the ranks' shares of loss, squared norm and expert load, and take their largest memory.

    Three small all-reduces; nobody waits for them until the figures are read.
    """
    uneven, layers = _expert_load(state, mesh)
    stage_ranks = mesh.plan.degrees.stage
    shares = torch.stack(
        [
            loss.float() / mesh.size("tp"),  # ranks of one tp group computed the same loss
            local_square_sum(state.parameters(), stage_ranks, mesh.device),
            uneven / stage_ranks,
            torch.tensor(layers / stage_ranks, device=mesh.device),
            torch.tensor(float(stop), device=mesh.device),
        ]
    )
    largest = torch.tensor(float(memory), device=mesh.device)
    if mesh.plan.degrees.world > 1:
        dist.all_reduce(shares)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return shares, largest


def even_experts(state: TrainState) -> None:
    """Let every router that balances by bias answer to the load of the step that was just measured."""
    for router in _routers(state):
        router.even()


def _routers(state: TrainState) -> list[Router]:
    return [module for part in state.parts for module in part.modules() if isinstance(module, Router)]


def _expert_load(state: TrainState, mesh: Mesh) -> tuple[Tensor, int]:
    """Give every router its global load; the sum of their imbalances (max over mean), and how many there are."""
    routers = _routers(state)
    if not routers:
        return torch.zeros((), device=mesh.device), 0
    loads_LE = torch.stack([router.take_load() for router in routers])
    if group := mesh.group("replicate", "shard", "cp", "tp"):
        dist.all_reduce(loads_LE, group=group)
    for router, load_E in zip(routers, loads_LE, strict=True):
        router.step_load_E = load_E
    return (loads_LE.amax(1) / loads_LE.mean(1)).sum(), len(routers)
