"""A module reduced to the layers of one pipeline stage, its forward unchanged.

The module's forward runs on every stage. Modules before the layers are replaced by placeholders without parameters, and
the hidden states received from the previous stage replace theirs. The first layer after the stage's last one ends the
forward: nothing behind it runs. So what the forward itself computes for the layers (positions, masks) exists on every
stage.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from danlu.framework.custom.construct import CustomModelError
from danlu.framework.custom.documents import packed_inputs
from danlu.framework.custom.forward_trace import ForwardTrace, get_logits
from danlu.framework.custom.module_structure import ModuleStructure, has_parameters, tied_parameters
from danlu.spec.plan import Plan
from danlu.torch_compat import tree_map


class _StageExitError(Exception):
    """Ends the forward of a stage with the hidden states for the next one."""

    def __init__(self, hidden_states: Tensor) -> None:
        self.hidden_states = hidden_states


class _LayerPlaceholder(nn.Module):
    """Replaces a layer of another stage: passes hidden states on, inserts the received ones, or ends the forward."""

    def __init__(self, tuples: int, ends: bool) -> None:
        super().__init__()
        self.output_tuple_size = tuples
        self.ends_stage = ends
        self.received: Tensor | None = None

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        """Take the layer's arguments and return values of the same structure."""
        if self.ends_stage:
            raise _StageExitError(hidden_states)
        if self.received is not None:
            hidden_states, self.received = self.received, None
        return (hidden_states, *[None] * (self.output_tuple_size - 1)) if self.output_tuple_size else hidden_states


class _ModulePlaceholder(nn.Module):
    """Replaces a module around the layers, on stages that do not need what it computes."""

    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.returned = returned

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Zeros of the shape that the module returned in the forward trace; expanded, so they take no memory."""
        device = next((arg.device for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)), None)

        def zeros(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return torch.zeros((), dtype=value.dtype, device=device).expand(value.shape)

        return tree_map(zeros, self.returned)


def check_pipeline_support(module: nn.Module, structure: ModuleStructure, trace: ForwardTrace, plan: Plan) -> None:
    """Raise `CustomModelError` for what a pipeline needs and this module lacks."""
    key, one = "degrees.pp", "or `pp = 1`"
    pp, stages, layers = plan.degrees.pp, plan.num_stages, plan.pipeline.layers
    if not structure.blocks:
        raise CustomModelError(
            key, f"is {pp}, but the module has no list of layers", f"keep the layers in an nn.ModuleList, {one}"
        )
    if trace.forward_error:
        raise CustomModelError(
            key, f"is {pp}, but how the module uses its layers is unknown: {trace.forward_error}", "`pp = 1`"
        )
    if trace.not_sequential:
        raise CustomModelError(
            key,
            f"is {pp}, but the layers of `{structure.layer_list}` are not sequential: {trace.not_sequential}",
            f"pass the hidden states from layer to layer as first argument, {one}",
        )
    if stages > len(structure.blocks):
        raise CustomModelError(
            key,
            f"makes {stages} stages, but `{structure.layer_list}` has {len(structure.blocks)} layers",
            "fewer stages",
        )
    if layers and sum(layers) != len(structure.blocks):
        raise CustomModelError(
            "pipeline.layers",
            f"adds up to {sum(layers)} layers, but `{structure.layer_list}` has {len(structure.blocks)}",
            "one entry a stage that add up to it, or remove it to spread the layers evenly",
        )
    both = {name for name in trace.called_before if name in trace.called_after}
    called = {*trace.called_before, *trace.called_after} - both
    loose = [name for name in _outer_parameters(module, structure) if not _is_in(name, called)]
    if loose:
        raise CustomModelError(
            key,
            f"is {pp}, but parameter `{loose[0]}` is in no module that is called either before or after the layers, "
            "so it belongs to no stage",
            f"put it into a module of its own, {one}",
        )
    for names in tied_parameters(module):
        if len({_home(name, structure) for name in names}) == 1:
            continue
        raise CustomModelError(
            key,
            f"is {pp}, but {' and '.join(f'`{name}`' for name in names)} are one parameter on different stages",
            f"use a parameter for each, {one}",
        )


def keep_stage_layers(
    stage_module: nn.Module, structure: ModuleStructure, trace: ForwardTrace, layer_range: range
) -> None:
    """Keep the layers `layer_range`, the modules before the layers on the first stage, those after them on the last."""
    first, last = layer_range.start == 0, layer_range.stop == len(structure.blocks)
    for number, name in enumerate(structure.blocks):
        if number not in layer_range:
            _replace(stage_module, name, _LayerPlaceholder(trace.output_tuple_size, ends=number >= layer_range.stop))
    kept = {*trace.called_before} if first else set()
    kept |= {*trace.called_after} if last else set()
    for name in structure.outer_modules:
        if name not in kept and has_parameters(stage_module.get_submodule(name)):
            _replace(stage_module, name, _ModulePlaceholder(trace.called_before.get(name)))
    entrance = None if first else stage_module.get_submodule(structure.blocks[layer_range.start - 1])
    stage_module.forward = partial(_stage_forward, stage_module.forward, entrance)


def return_logits(stage_module: nn.Module) -> None:
    """Make an unsplit module return its logits and nothing else."""
    stage_module.forward = partial(_stage_forward, stage_module.forward, None)


def _stage_forward(
    forward: Callable[..., Any], entrance: nn.Module | None, x: Tensor, positions: Tensor | None = None
) -> Tensor:
    tokens = x
    if isinstance(entrance, _LayerPlaceholder):
        entrance.received = x
        tokens = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)
    try:
        return get_logits(forward(tokens, **packed_inputs(positions)))
    except _StageExitError as leaving:
        return leaving.hidden_states


def _replace(stage_module: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(stage_module.get_submodule(parent), child, new)


def _outer_parameters(module: nn.Module, structure: ModuleStructure) -> list[str]:
    return [name for name, _ in module.named_parameters() if not _is_in(name, set(structure.blocks))]


def _home(name: str, structure: ModuleStructure) -> str:
    """The layer, or the module around the layers, that a parameter belongs to."""
    return next((each for each in (*structure.blocks, *structure.outer_modules) if name.startswith(f"{each}.")), name)


def _is_in(name: str, modules: set[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)
