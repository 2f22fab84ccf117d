"""States sharded over ranks (FSDP2), replicated over groups of them (HSDP)."""

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from danlu.parallel.cut import cut_over, held_offset, lean_fsdp


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
    rest: MixedPrecisionPolicy,
    reshard_after_forward: bool,
    average: bool = False,
) -> None:
    """Shard every unit, inner ones first, then the `rest` of `part`: a tied embedding, or nothing.

    Gradients are summed unless `average`: the loss of a recipe is already divided by the tokens of the global batch,
    so one rule holds on every mesh, expert ranks included. A loop of the user's own takes the mean of a rank's share.
    On a mesh of one rank this only casts precision, so that every layout computes in the same dtypes.
    """
    allow_view(part)
    with lean_fsdp():
        for unit in units:
            fully_shard(
                unit.module,
                mesh=unit.mesh,
                mp_policy=policy(unit.name),
                reshard_after_forward=reshard_after_forward and not unit.last,
                shard_placement_fn=cut_over(unit.mesh),
            )
        fully_shard(part, mesh=mesh, mp_policy=rest, reshard_after_forward=False)
    for module in part.modules():
        if isinstance(module, FSDPModule) and not average:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def allow_view(part: nn.Module, name: str = "") -> None:
    """Silence FSDP's warning about views for the module `name` of a part and those around it.

    For what goes straight to the loss: scores are the largest activation of a model, too large to copy, and
    nobody changes them in place or compiles what takes them, which is what the warning is about.
    """
    depths = range(name.count(".") + 2 if name else 1)
    around = [part.get_submodule(".".join(name.split(".")[:depth])) for depth in depths]
    classes = "|".join(re.escape(type(module).__name__.removeprefix("FSDP")) for module in around)
    warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \(FSDP({classes})\) returned a view tensor")


def reduce_replicas(part: nn.Module, wanted: bool) -> None:
    """Whether the next backward pass also sums gradients over replicas; only the last microbatch of a step needs it."""
    if isinstance(part, FSDPModule):
        part.set_requires_all_reduce(wanted)


def free_gathered(part: nn.Module) -> None:
    """Free the parameters that a forward without a backward left gathered: the next step would not gather new ones."""
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def held_slice(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """What this rank holds of a parameter, and where in the whole it begins."""
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.ndim
    return parameter.to_local(), held_offset(parameter)
