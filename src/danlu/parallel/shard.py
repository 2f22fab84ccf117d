"""States sharded over ranks (FSDP2), replicated over groups of them (HSDP)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from danlu.parallel.cut import cut_over, one_chunk_each


@dataclass(frozen=True)
class Unit:
    """A module whose parameters are gathered and freed together."""

    name: str
    module: nn.Module
    mesh: DeviceMesh
    last: bool = False
    """The backward pass begins with it, so it is not freed in between."""


def apply_sharding(
    part: nn.Module,
    units: Iterable[Unit],
    mesh: DeviceMesh,
    policy: Callable[[str], MixedPrecisionPolicy],
    reshard_after_forward: bool,
) -> None:
    """Shard every unit, inner ones first, then what is left of `part`: a tied embedding, or nothing.

    Gradients are summed, not averaged: the loss is already divided by the tokens of the global batch,
    so one rule holds on every mesh, expert ranks included. On a mesh of one rank this only casts
    precision, so that every layout computes in the same dtypes.
    """
    with one_chunk_each():
        for unit in units:
            fully_shard(
                unit.module,
                mesh=unit.mesh,
                mp_policy=policy(unit.name),
                reshard_after_forward=reshard_after_forward and not unit.last,
                shard_placement_fn=cut_over(unit.mesh),
            )
        fully_shard(part, mesh=mesh, mp_policy=policy("embed"), reshard_after_forward=False)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def reduce_replicas(part: nn.Module, wanted: bool) -> None:
    """Whether the next backward pass also sums gradients over replicas; only the last microbatch of a step needs it."""
    if isinstance(part, FSDPModule):
        part.set_requires_all_reduce(wanted)
