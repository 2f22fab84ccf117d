"""Parameters, gradients and optimizer states sharded over ranks (FSDP2), replicated over groups of them (HSDP)."""

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from danlu.parallel.shard_dim import local_shard_offset, patch_fully_shard, shard_dim


@dataclass(frozen=True)
class FsdpUnit:
    """A module whose parameters are gathered and freed together."""

    name: str
    module: nn.Module
    mesh: DeviceMesh
    keep_unsharded: bool = False
    """The backward pass starts with it, so it is not freed in between."""
    cast_inputs: bool = True
    """Whether its inputs are cast to its dtype. Not inside of another unit of the same dtype, which casts its own: what
    that keeps in fp32, such as a router's weights, stays so."""


def apply_fsdp(
    stage_module: nn.Module,
    units: Iterable[FsdpUnit],
    mesh: DeviceMesh,
    policy: Callable[[str], MixedPrecisionPolicy],
    root_policy: MixedPrecisionPolicy,
    reshard_after_forward: bool,
    average: bool = False,
) -> None:
    """Shard every unit, inner ones first, then the rest of `stage_module`: a tied embedding, or nothing.

    Gradients are summed unless `average`: the loss of a recipe is already divided by the tokens of the global batch,
    so one rule holds on every mesh, expert ranks included. A custom training loop takes the mean over a rank's rows.
    On a mesh of one rank this only casts precision, so that every layout computes in the same dtypes.
    """
    silence_view_warning(stage_module)
    with patch_fully_shard():
        for unit in units:
            fully_shard(
                unit.module,
                mesh=unit.mesh,
                mp_policy=policy(unit.name)
                if unit.cast_inputs
                else replace(policy(unit.name), cast_forward_inputs=False),
                reshard_after_forward=reshard_after_forward and not unit.keep_unsharded,
                shard_placement_fn=shard_dim(unit.mesh),
            )
        fully_shard(stage_module, mesh=mesh, mp_policy=root_policy, reshard_after_forward=False)
    for module in stage_module.modules():
        if isinstance(module, FSDPModule) and not average:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def silence_view_warning(stage_module: nn.Module, name: str = "") -> None:
    """Silence FSDP's warning about views for the module `name` of a stage module and its parents.

    For what goes directly to the loss: logits are the largest activation of a model, too large to copy, and they are
    neither changed in place nor passed to compiled code, which is what the warning is about.
    """
    depths = range(name.count(".") + 2 if name else 1)
    around = [stage_module.get_submodule(".".join(name.split(".")[:depth])) for depth in depths]
    classes = "|".join(re.escape(type(module).__name__.removeprefix("FSDP")) for module in around)
    warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \(FSDP({classes})\) returned a view tensor")


def set_replica_all_reduce(stage_module: nn.Module, wanted: bool) -> None:
    """Set whether the next backward pass also sums gradients over replicas: only a step's last microbatch needs it."""
    if isinstance(stage_module, FSDPModule):
        stage_module.set_requires_all_reduce(wanted)


def defer_reduction(stage_module: nn.Module, deferred: bool, keep_gathered: bool) -> None:
    """Set whether the next backward pass leaves gradients unsharded, to be reduced with a later one's.

    With `keep_gathered`, parameters stay gathered for the microbatch after it, too.
    """
    if isinstance(stage_module, FSDPModule):
        stage_module.set_requires_gradient_sync(not deferred)
        stage_module.set_reshard_after_backward(not (deferred and keep_gathered))


def reshard_all(stage_module: nn.Module) -> None:
    """Free parameters that a forward without a backward left gathered: else the next step would not gather again."""
    for module in stage_module.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_shard(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's shard of a parameter, and its offset in the global tensor."""
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.ndim
    return parameter.to_local(), local_shard_offset(parameter)
