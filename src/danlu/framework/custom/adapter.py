"""A custom model, as `build_train_state` sees it."""

import warnings
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from danlu.comm.mesh import ParallelMesh
from danlu.framework import precision
from danlu.framework.custom.construct import CustomModelError, build_meta_module, build_seeded_module
from danlu.framework.custom.documents import (
    check_block_comparison,
    check_document_support,
    is_verified_by_name,
    verify_documents,
)
from danlu.framework.custom.experts import (
    apply_expert_parallel,
    balance_experts,
    check_expert_parallelism,
    known_experts,
)
from danlu.framework.custom.forward_trace import trace_forward
from danlu.framework.custom.kernels import apply_kernels
from danlu.framework.custom.module_adapter import (
    ModuleAdapter,
    check_layer_list,
    check_precision_patterns,
    retie_parameters,
)
from danlu.framework.custom.module_structure import ModuleStructure, find_layers, tied_parameters
from danlu.framework.custom.stage_split import check_pipeline_support, keep_stage_layers, return_logits
from danlu.framework.custom.tp_plan import resolve_tp_plan
from danlu.framework.custom.verify_tp import ReferenceOutputs, has_real_tensors
from danlu.framework.fp8.apply import unquantized
from danlu.framework.layer_seeds import LayerSeeds
from danlu.parallel.fsdp import FsdpUnit, local_shard, silence_view_warning
from danlu.spec.custom_model import CustomModel
from danlu.spec.parameters import ParameterShape
from danlu.spec.plan import Plan
from danlu.spec.recipe import Recipe
from danlu.spec.rules import group_problems


class CustomModelAdapter(ModuleAdapter):
    """A `ModelAdapter` for any module: built once on meta and traced once to see how it uses its layers.

    The constructor raises `CustomModelError` for everything that the plan asks for and the module does not support.
    """

    def __init__(self, recipe: Recipe, plan: Plan) -> None:
        assert isinstance(recipe.model, CustomModel)
        self.recipe, self.plan, self.custom_model = recipe, plan, recipe.model
        self.meta_module = build_meta_module(self.custom_model)
        structure = find_layers(self.meta_module, self.custom_model.blocks)
        sequences = recipe.batch.sequences // plan.degrees.dp // plan.microbatches
        self.forward_trace = trace_forward(self.custom_model, structure, sequences, recipe.batch.length)
        tp = plan.degrees.tp
        tp_plan = resolve_tp_plan(self.meta_module, self.custom_model.tensor, tp) if tp > 1 else {}
        super().__init__(structure, tp_plan, {*self.forward_trace.called_before, *self.forward_trace.called_after})
        self.layer_seeds: list[LayerSeeds] = []
        self._layer_ranges: dict[nn.Module, range] = {}
        self._check()

    def stage_module(self, stage: int) -> nn.Module:
        """The module with the layers of one stage."""
        stage_module = build_meta_module(self.custom_model)
        layer_range = self.plan.stage_layers(len(self.structure.blocks))[stage]
        if self.plan.num_stages == 1:
            return_logits(stage_module)
        else:
            keep_stage_layers(stage_module, self.structure, self.forward_trace, layer_range)
        self._apply_kernels(stage_module)
        self._layer_ranges[stage_module] = layer_range
        layers = {number: stage_module.get_submodule(self.structure.blocks[number]) for number in layer_range}
        self.layer_seeds.append(LayerSeeds(stage_module, layers, self.plan.microbatches))
        return stage_module

    def apply_model_parallel(self, stage_module: nn.Module, mesh: ParallelMesh) -> None:
        """Shard matrices over `tp`, and the experts of known families over `ep`."""
        super().apply_model_parallel(stage_module, mesh)
        if mesh.ep_mesh is not None:
            apply_expert_parallel(stage_module, mesh.ep_mesh, mesh.ep_levels, self.plan.dispatch_chunks)

    def fsdp_units(self, stage_module: nn.Module, mesh: ParallelMesh) -> Iterator[FsdpUnit]:
        """Layers, with `ep` their experts before them; then called modules around them that share no parameters."""
        for name in self.forward_trace.called_after:
            silence_view_warning(stage_module, name)
        for unit in super().fsdp_units(stage_module, mesh):
            if mesh.ep_mesh is not None:
                assert mesh.expert_fsdp_mesh is not None
                for experts in known_experts(unit.module).values():
                    yield FsdpUnit(unit.name, experts, mesh.expert_fsdp_mesh, cast_inputs=False)
            yield unit

    def init_weights(self, stage_modules: Iterable[nn.Module], mesh: ParallelMesh) -> None:
        """Initial values from the user's code; left undefined where `weights` are read afterwards.

        The full module is built on every rank and each copies its shards: the only way to get the values that unknown
        code would give. With `tp` and with `use_kernels` the full module is also what the other one is compared with.
        """
        stage_modules = list(stage_modules)
        if not has_real_tensors():
            for stage_module in stage_modules:
                balance_experts(stage_module)
        if self.recipe.weights:
            if mesh.size("tp") > 1 and mesh.rank == 0:
                warnings.warn(
                    f"TP of {self.custom_model.factory} is not verified, because `weights` is set and no unsharded "
                    "module is built; a short run without `weights` verifies it",
                    RuntimeWarning,
                    stacklevel=2,
                )
            if self.recipe.data.document_mask and mesh.rank == 0 and not is_verified_by_name(self.meta_module):
                warnings.warn(
                    f"whether {self.custom_model.factory} keeps documents apart is not verified, because `weights` is "
                    "set and no unsharded module is built; a short run without `weights` verifies it",
                    RuntimeWarning,
                    stacklevel=2,
                )
            for stage_module in stage_modules:
                materialize(stage_module, mesh.device)
            return
        full_module = build_seeded_module(self.custom_model, self.recipe.seed)
        if self.recipe.data.document_mask and has_real_tensors():
            verify_documents(full_module, self.custom_model.vocabulary)
        is_real, has_tp = has_real_tensors(), mesh.size("tp") > 1
        expected = self._expected(full_module) if is_real and (has_tp or self.custom_model.use_kernels) else None
        expected_dropout = (
            self._expected(full_module, _seeds(full_module, self.structure))
            if is_real and has_tp and not self.plan.compile
            else None
        )
        dropout_matches = True
        for stage_module, seeds in zip(stage_modules, self.layer_seeds, strict=True):
            materialize(stage_module, mesh.device)
            copy_shards_from(stage_module, full_module)
            where = (
                stage_module,
                self._layer_ranges[stage_module],
                mesh.device,
                mesh.size("tp"),
                mesh.coordinate("tp"),
            )
            with unquantized([stage_module]):  # as the full module is
                if expected:
                    expected.verify(*where)
                if expected_dropout and expected and not torch.equal(expected_dropout.logits, expected.logits):
                    dropout_matches &= expected_dropout.dropout_matches(*where, seeds)
        if not dropout_matches and mesh.coordinate("tp") == 0 and mesh.dp_rank == 0:
            warnings.warn(
                f"`degrees.tp` is {mesh.size('tp')}, and {self.custom_model.factory} has dropout on sharded "
                "activations (attention, or between the matrices of a pair): dropout masks repeat across tp ranks, so "
                "results differ from one process; dropout on unsharded hidden states is not affected",
                RuntimeWarning,
                stacklevel=2,
            )

    def _apply_kernels(self, module: nn.Module) -> None:
        if self.custom_model.use_kernels:
            unit = self.structure.blocks[0] if self.structure.blocks else self.root
            apply_kernels(module, precision.compute_dtype(self.recipe.precision, unit), self.custom_model.factory)

    def _expected(self, full_module: nn.Module, seeds: LayerSeeds | None = None) -> ReferenceOutputs:
        shape = (
            (1, min(16, self.recipe.batch.length)) if self.plan.num_stages == 1 else self.forward_trace.logits.shape[:2]
        )
        return ReferenceOutputs(full_module, self.structure, (shape[0], shape[1]), self.custom_model.vocabulary, seeds)

    def stage_io_meta(self, stage: int) -> tuple[Tensor, Tensor]:
        """Shapes from the forward trace, in the dtypes that the layers compute in."""
        layer_range = self.plan.stage_layers(len(self.structure.blocks))[stage]
        tokens = torch.empty(self.forward_trace.logits.shape[:2], dtype=torch.int64, device="meta")
        return (
            tokens if layer_range.start == 0 else self._hidden_states_meta(layer_range.start - 1),
            self._logits_meta()
            if layer_range.stop == len(self.structure.blocks)
            else self._hidden_states_meta(layer_range.stop - 1),
        )

    def _hidden_states_meta(self, layer: int) -> Tensor:
        dtype = precision.compute_dtype(self.recipe.precision, self.structure.blocks[layer])
        return _like(self.forward_trace.hidden_states[layer + 1], dtype)

    def _logits_meta(self) -> Tensor:
        last = self.forward_trace.called_after[-1] if self.forward_trace.called_after else self.root
        return _like(self.forward_trace.logits, precision.compute_dtype(self.recipe.precision, last))

    def _check(self) -> None:
        plan, degrees = self.plan, self.plan.degrees
        if self.forward_trace.forward_error:
            warnings.warn(
                f"module {self.custom_model.factory} does not run on FakeTensors ({self.forward_trace.forward_error}): "
                "its logits are not checked before the first step, and it cannot be dry-run",
                RuntimeWarning,
                stacklevel=2,
            )
        if self.recipe.data.document_mask:
            check_document_support(self.meta_module)
            check_block_comparison(plan)
        if degrees.pp > 1:
            check_pipeline_support(self.meta_module, self.structure, self.forward_trace, plan)
        check_layer_list(self.structure, plan)
        if degrees.ep > 1:
            check_expert_parallelism(self.meta_module, self.structure, plan)
        check_precision_patterns(self.structure, self.recipe.precision)
        self._apply_kernels(self.meta_module)
        parameters = [ParameterShape(name, tuple(each.shape)) for name, each in self.meta_module.named_parameters()]
        for problem in group_problems(self.recipe.optimizer, parameters):
            raise CustomModelError(*problem)


def _seeds(module: nn.Module, structure: ModuleStructure) -> LayerSeeds:
    """Seeds for the layers of a full module."""
    layers = {number: module.get_submodule(name) for number, name in enumerate(structure.blocks)}
    return LayerSeeds(module, layers, microbatches=1)


@torch.no_grad()
def copy_shards_from(stage_module: nn.Module, full_module: nn.Module) -> None:
    """Copy this rank's shard of every parameter from the full module."""
    for name, parameter in stage_module.named_parameters():
        local, offset = local_shard(parameter)
        index = tuple(slice(at, at + size) for at, size in zip(offset, local.shape, strict=True))
        local.copy_(full_module.get_parameter(name)[index])


def materialize(stage_module: nn.Module, device: torch.device) -> None:
    """Allocate parameters; buffers keep their values, and tied parameters stay tied."""
    tied = tied_parameters(stage_module)
    buffers = dict(stage_module.named_buffers())
    stage_module.to_empty(device=device)
    for name, buffer in stage_module.named_buffers():
        buffer.copy_(buffers[name])
    retie_parameters(stage_module, tied)


def _like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(tensor.shape, dtype=dtype, device="meta", requires_grad=True)
