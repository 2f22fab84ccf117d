"""A user's module as `apply_parallelism` sees it: its layers, its tensor-parallel plan, what FSDP gathers together."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from torch import nn

from danlu.comm.mesh import ParallelMesh
from danlu.framework.custom.construct import CustomModelError
from danlu.framework.custom.module_structure import ModuleStructure, has_parameters, tied_parameters
from danlu.framework.fp8.apply import QuantizedModule, linear_layers
from danlu.memory.recompute import RecomputeRegion
from danlu.parallel.fsdp import FsdpUnit
from danlu.parallel.tensor import TPStyle, apply_tp
from danlu.spec.plan import Plan
from danlu.spec.problem import suggest_name
from danlu.spec.recipe import PrecisionConfig
from danlu.spec.recompute import RecomputeLayers


class ModuleAdapter:
    """Any module with a list of layers; `called` names the modules around them that its forward calls as modules."""

    root = ""

    def __init__(
        self, structure: ModuleStructure, tp_plan: Mapping[str, TPStyle], called: Collection[str] = frozenset()
    ) -> None:
        self.structure, self.tp_plan, self.called = structure, tp_plan, called

    def apply_model_parallel(self, stage_module: nn.Module, mesh: ParallelMesh) -> None:
        """Shard the matrices that the stage kept over `tp`, as the plan of the recipe or of the module itself says."""
        if mesh.tp_mesh is not None:
            kept = {name for name, module in stage_module.named_modules() if has_parameters(module)}
            tied = tied_parameters(stage_module)
            styles = {name: style for name, style in self.tp_plan.items() if name in kept}
            apply_tp(stage_module, styles, mesh.tp_mesh)
            retie_parameters(stage_module, tied)

    def blocks(self, stage_module: nn.Module) -> list[nn.Module]:
        """The layers of a stage module."""
        return list(self.structure.layers_in(stage_module).values())

    def quantized_modules(self, stage_module: nn.Module) -> Iterator[QuantizedModule]:
        """The linear layers inside of layers."""
        for name, block in self.structure.layers_in(stage_module).items():
            yield from linear_layers(name, block)

    def recompute_regions(self, stage_module: nn.Module, plan: Plan) -> Iterator[RecomputeRegion]:
        """Entire layers, which may draw random numbers (dropout)."""
        modes = dict(zip(self.structure.blocks, plan.recompute_modes(len(self.structure.blocks)), strict=True))
        for name, block in self.structure.layers_in(stage_module).items():
            if (mode := modes[name]) != "none":
                yield RecomputeRegion(block, mode, uses_rng=True)

    def fsdp_units(self, stage_module: nn.Module, mesh: ParallelMesh) -> Iterator[FsdpUnit]:
        """Layers; then called modules around them, unless they share parameters with others."""
        for name, block in self.structure.layers_in(stage_module).items():
            yield FsdpUnit(name, block, mesh.fsdp_mesh)
        shared = [name for names in tied_parameters(stage_module) for name in names]
        for name, module in self.structure.outer_modules_in(stage_module).items():
            if name in self.called and not any(each.startswith(f"{name}.") for each in shared):
                yield FsdpUnit(name, module, mesh.fsdp_mesh)


def check_precision_patterns(structure: ModuleStructure, precision: PrecisionConfig) -> None:
    """Raise `CustomModelError` if a pattern of `precision.layers` matches no module."""
    names = [*structure.blocks, *structure.outer_modules, ""]
    for index, group in enumerate(precision.layers):
        if not any(fnmatchcase(name, group.match) for name in names):
            key = f"precision.layers[{index}].match"
            raise CustomModelError(
                key, f'is "{group.match}", which matches no module', suggest_name(group.match, names)
            )


def check_layer_list(structure: ModuleStructure, plan: Plan) -> None:
    """Raise `CustomModelError` if recompute or compile is set and the module lacks the layers for it."""
    asked = {"recompute": plan.recompute != "none", "compile": plan.compile}
    for key, wanted in asked.items():
        if wanted and not structure.blocks:
            raise CustomModelError(
                key,
                "works layer by layer, but the module has no list of layers",
                "keep the layers in an nn.ModuleList, or remove it from the plan",
            )
    if isinstance(plan.recompute, RecomputeLayers) and (wrong := plan.recompute.beyond(len(structure.blocks))):
        raise CustomModelError(*wrong)


def retie_parameters(stage_module: nn.Module, tied: Iterable[list[str]]) -> None:
    """Tie parameters again that were tied before they were replaced."""
    for first, *others in tied:
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(stage_module.get_submodule(owner), attribute, stage_module.get_parameter(first))
