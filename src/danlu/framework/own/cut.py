"""A module cut to the layers of one pipeline stage, its own forward left as it is.

The module's forward runs on every stage. On the way in, what comes before the layers is replaced by stand-ins without
parameters, and the stream from the stage before takes the place of theirs. On the way out the layer after the last one
held ends the forward: nothing behind it runs. So what the forward itself computes for the layers (positions, masks)
is there on every stage.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from danlu.framework.own.anatomy import Anatomy, has_parameters, shared_parameters
from danlu.framework.own.factory import OwnModelError
from danlu.framework.own.rehearsal import Rehearsal, scores_of
from danlu.spec.plan import Plan


class _LeaveError(Exception):
    """Ends the forward of a stage with the stream for the next one."""

    def __init__(self, stream: Tensor) -> None:
        self.stream = stream


class _Elsewhere(nn.Module):
    """Stands where a layer of another stage was: lets the stream pass, brings the one received, or ends the forward."""

    def __init__(self, tuples: int, ends: bool) -> None:
        super().__init__()
        self.tuples = tuples
        self.ends = ends
        self.received: Tensor | None = None

    def forward(self, stream: Tensor, *_: Any, **__: Any) -> Any:
        """Take the layer's arguments, return what it would return."""
        if self.ends:
            raise _LeaveError(stream)
        if self.received is not None:
            stream, self.received = self.received, None
        return (stream, *[None] * (self.tuples - 1)) if self.tuples else stream


class _StandIn(nn.Module):
    """Stands where a module before the layers was, on stages that do not need what it computes."""

    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.returned = returned

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Zeros of the shape that the module returned in the rehearsal; they take no memory."""
        device = next((arg.device for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)), None)

        def zeros(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return torch.zeros((), dtype=value.dtype, device=device).expand(value.shape)

        return tree_map(zeros, self.returned)


def check_cuttable(empty: nn.Module, anatomy: Anatomy, seen: Rehearsal, plan: Plan) -> None:
    """Say what a pipeline needs and this module does not offer."""
    key, one = "degrees.pp", "or `pp = 1`"
    pp, stages, layers = plan.degrees.pp, plan.stages, plan.pipeline.layers
    if not anatomy.blocks:
        raise OwnModelError(
            key, f"is {pp}, but the module has no list of layers", f"keep the layers in an nn.ModuleList, {one}"
        )
    if seen.failed:
        raise OwnModelError(
            key, f"is {pp}, but how the module uses its layers cannot be seen: {seen.failed}", "`pp = 1`"
        )
    if seen.unchained:
        raise OwnModelError(
            key,
            f"is {pp}, but the layers of `{anatomy.container}` are no chain: {seen.unchained}",
            f"a forward that hands the stream from layer to layer as first argument, {one}",
        )
    if stages > len(anatomy.blocks):
        raise OwnModelError(
            key, f"makes {stages} stages, but `{anatomy.container}` has {len(anatomy.blocks)} layers", "fewer stages"
        )
    if layers and sum(layers) != len(anatomy.blocks):
        raise OwnModelError(
            "pipeline.layers",
            f"adds up to {sum(layers)} layers, but `{anatomy.container}` has {len(anatomy.blocks)}",
            "one entry a stage that add up to it, or remove it to spread the layers evenly",
        )
    both = {name for name in seen.before if name in seen.after}
    called = {*seen.before, *seen.after} - both
    loose = [name for name in _outer_parameters(empty, anatomy) if not _is_in(name, called)]
    if loose:
        raise OwnModelError(
            key,
            f"is {pp}, but parameter `{loose[0]}` is not of a module that is called either before or after the layers, "
            "so that it cannot be given to one stage",
            f"a module of its own for it, {one}",
        )
    for names in shared_parameters(empty):
        if len({_home(name, anatomy) for name in names}) == 1:
            continue
        raise OwnModelError(
            key,
            f"is {pp}, but {' and '.join(f'`{name}`' for name in names)} are one parameter on different stages",
            f"a parameter for each, {one}",
        )


def cut(part: nn.Module, anatomy: Anatomy, seen: Rehearsal, held: range) -> None:
    """Leave only the layers `held`, what comes before them on the first stage and behind them on the last."""
    first, last = held.start == 0, held.stop == len(anatomy.blocks)
    for number, name in enumerate(anatomy.blocks):
        if number not in held:
            _replace(part, name, _Elsewhere(seen.tuples, ends=number >= held.stop))
    kept = {*seen.before} if first else set()
    kept |= {*seen.after} if last else set()
    for name in anatomy.outside:
        if name not in kept and has_parameters(part.get_submodule(name)):
            _replace(part, name, _StandIn(seen.before.get(name)))
    entrance = None if first else part.get_submodule(anatomy.blocks[held.start - 1])
    part.forward = partial(_stage_forward, part.forward, entrance)


def whole(part: nn.Module) -> None:
    """Let a module that is not cut return its scores and nothing else."""
    part.forward = partial(_stage_forward, part.forward, None)


def _stage_forward(forward: Callable[[Tensor], Any], entrance: nn.Module | None, x: Tensor) -> Tensor:
    tokens = x
    if isinstance(entrance, _Elsewhere):
        entrance.received = x
        tokens = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)
    try:
        return scores_of(forward(tokens))
    except _LeaveError as leaving:
        return leaving.stream


def _replace(part: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(part.get_submodule(parent), child, new)


def _outer_parameters(module: nn.Module, anatomy: Anatomy) -> list[str]:
    return [name for name, _ in module.named_parameters() if not _is_in(name, set(anatomy.blocks))]


def _home(name: str, anatomy: Anatomy) -> str:
    """The layer, or the module outside of them, that a parameter belongs to."""
    return next((each for each in (*anatomy.blocks, *anatomy.outside) if name.startswith(f"{each}.")), name)


def _is_in(name: str, modules: set[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)
