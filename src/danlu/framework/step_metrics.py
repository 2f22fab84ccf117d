"""Loss, norm, memory and expert load of a step, over all ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from danlu.comm.mesh import ParallelMesh
from danlu.comm.traffic_meter import StepTraffic
from danlu.framework.decoder.moe import Router
from danlu.parallel.batch import Batch
from danlu.parallel.grad_norm import local_squared_norm


@dataclass(frozen=True)
class StepMetrics:
    """Global metrics of one step, the same on every rank."""

    loss: float
    norm: float
    memory: int
    imbalance: float | None
    stop_requested: bool
    """A rank was asked to stop."""
    mtp_losses: tuple[float, ...] | None = None
    """Mean loss of every module of multi-token prediction; None without it."""
    local_square: float = 0.0
    """This rank's part of the squared norm, the only one that differs between ranks: replicas have the same."""
    traffic: StepTraffic = field(default_factory=StepTraffic)
    """Since the metrics of the step before: bytes of all ranks, and seconds of all-to-alls in the mean of them."""


def compute_step_metrics(
    modules: Iterable[nn.Module], mesh: ParallelMesh, loss: Tensor, memory: int, stop: bool
) -> StepMetrics:
    """Metrics of one step over all ranks, which hold `modules`; `loss` is this rank's share of the mean.

    As a vector it is followed by those of multi-token prediction.
    """
    shares, largest, mine = all_reduce_metrics(modules, mesh, loss, memory, stop)
    levels = len(mesh.world.levels)
    local_square, total_loss, square, total_uneven, total_layers, stops, exchanges, *further = torch.cat(
        [mine, shares]
    ).tolist()
    sent, further = further[:levels], further[levels:]
    return StepMetrics(
        loss=total_loss,
        norm=square**0.5,
        memory=int(largest),
        imbalance=total_uneven / total_layers if total_layers else None,
        stop_requested=stops > 0,
        mtp_losses=tuple(further) or None,
        local_square=local_square,
        traffic=StepTraffic(exchanges / mesh.world.size, tuple(sent)),
    )


def all_reduce_metrics(
    modules: Iterable[nn.Module], mesh: ParallelMesh, loss: Tensor, memory: int, stop: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Add up the ranks' shares of loss, squared norm, expert load and traffic, and take their largest memory.

    Two small all-reduces, and one of the experts' load; not waited for before the values are read. The last of the
    three is this rank's own share of the squared norm.
    """
    modules = list(modules)
    uneven, layers = _expert_load(modules, mesh)
    stage_ranks = mesh.plan.degrees.ranks_per_stage
    parameters = [parameter for module in modules for parameter in module.parameters()]
    exchanges, sent = mesh.world.pop_traffic()
    main, *further = (loss.float() / mesh.size("tp")).reshape(-1).unbind()  # a tp group computed the same loss
    shares = torch.stack(
        [
            main,
            local_squared_norm(parameters, stage_ranks, mesh.device),
            uneven / stage_ranks,
            torch.tensor(layers / stage_ranks, device=mesh.device),
            *torch.tensor([float(stop), exchanges, *sent], device=mesh.device),
            *further,
        ]
    )
    largest = torch.tensor(float(memory), device=mesh.device)
    mine = shares[1:2].clone()
    mesh.world.all_reduce(shares)
    mesh.world.all_reduce(largest, "max")
    return shares, largest, mine


def all_reduce_counted(batch: Batch, mesh: ParallelMesh) -> Tensor | None:
    """How many targets of the global batch count, so that the loss is divided by them before the backward pass.

    One small all-reduce; none where all targets count (None).
    """
    return None if batch.counted is None else all_reduce_counts(batch.counted, mesh)


def all_reduce_counts(mine: int | Sequence[int], mesh: ParallelMesh) -> Tensor:
    """Counts of this rank's targets, added up over the global batch."""
    counted = torch.tensor(mine, device=mesh.device)
    if group := mesh.group("replicate", "shard", "cp", "tp"):
        dist.all_reduce(counted, group=group)
    return counted // mesh.size("tp")  # ranks of one tp group counted the same targets


def update_router_biases(modules: Iterable[nn.Module]) -> None:
    """Adapt the bias of every router that balances by bias to the load of the step that was just measured."""
    for router in _routers(modules):
        router.update_bias()


def _routers(modules: Iterable[nn.Module]) -> list[Router]:
    return [layer for module in modules for layer in module.modules() if isinstance(layer, Router)]


def _expert_load(modules: Iterable[nn.Module], mesh: ParallelMesh) -> tuple[Tensor, int]:
    """Give every router its global load; the sum of their imbalances (max over mean), and how many there are."""
    routers = _routers(modules)
    if not routers:
        return torch.zeros((), device=mesh.device), 0
    loads_LE = torch.stack([router.pop_load() for router in routers])
    if group := mesh.group("replicate", "shard", "cp", "tp"):
        dist.all_reduce(loads_LE, group=group)
    for router, load_E in zip(routers, loads_LE, strict=True):
        router.step_load_E = load_E
    return (loads_LE.amax(1) / loads_LE.mean(1)).sum(), len(routers)
