"""One function that turns a recipe and a plan into a trainable model; its order is its documentation."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from danlu.comm.mesh import ParallelMesh
from danlu.compiler.blocks import apply_compile
from danlu.framework import precision
from danlu.framework.custom.adapter import CustomModelAdapter
from danlu.framework.decoder_adapter import DecoderAdapter
from danlu.framework.gradient_accumulation import GradientAccumulation
from danlu.framework.model_adapter import LayoutAdapter, ModelAdapter
from danlu.framework.optimizer import build_optimizer
from danlu.framework.state import TrainState
from danlu.framework.step_guard import StepGuard
from danlu.memory.recompute import apply_recompute
from danlu.parallel.batch import Batch
from danlu.parallel.fsdp import apply_fsdp
from danlu.parallel.loss import cross_entropy_sum
from danlu.parallel.pipeline import PipelineRunner
from danlu.spec.custom_model import CustomModel
from danlu.spec.plan import Plan
from danlu.spec.recipe import PrecisionConfig, Recipe


class ForwardBackward(Protocol):
    """Both passes of one step on this rank."""

    def __call__(self, batch: Batch, counted: Tensor | None = None) -> Tensor:
        """Leaves gradients, and returns this rank's share of the mean loss over the global batch.

        `counted` is how many targets of the global batch count (`all_reduce_counted`); None if all of them do.
        """
        ...


def make_adapter(recipe: Recipe, plan: Plan) -> ModelAdapter:
    """The adapter of a recipe's model: a described decoder, or a custom module."""
    return CustomModelAdapter(recipe, plan) if isinstance(recipe.model, CustomModel) else DecoderAdapter(recipe, plan)


def build_train_state(
    recipe: Recipe, plan: Plan, mesh: ParallelMesh, tensors: AbstractContextManager[object] | None = None
) -> tuple[TrainState, ForwardBackward]:
    """Build this rank's stages of the model, parallel as the plan says, its optimizer, and its forward and backward.

    A dry run passes the context in which `tensors` are made; nothing before that takes memory.
    """
    adapter = make_adapter(recipe, plan)
    stages = plan.stages_of_rank(mesh.coordinate("pp"))
    modules = [adapter.stage_module(stage) for stage in stages]
    for module in modules:
        apply_parallelism(module, adapter, plan, mesh, recipe.precision)
    with tensors or nullcontext():
        adapter.init_weights(modules, mesh)
    loss = partial(_loss, tokens=recipe.batch.tokens, vocabulary=recipe.model.vocabulary, tensor_group=mesh.group("tp"))
    forward_backward: ForwardBackward
    if plan.degrees.pp > 1:
        group = mesh.group("pp")
        assert group is not None
        forward_backward = PipelineRunner(plan, modules, stages, adapter.stage_io_meta, loss, mesh.device, group)
    else:
        forward_backward = GradientAccumulation(modules[0], loss, plan.microbatches)
    optimizer = build_optimizer(modules, recipe.optimizer)
    guard = StepGuard(recipe.spikes)
    return TrainState(modules, optimizer, recipe.seed, layer_seeds=adapter.layer_seeds, guard=guard), forward_backward


def apply_parallelism(
    module: nn.Module,
    adapter: LayoutAdapter,
    plan: Plan,
    mesh: ParallelMesh,
    dtypes: PrecisionConfig,
    average_gradients: bool = False,
) -> None:
    """Apply every axis of the plan to one stage of the model, in the one order that works; gradients are summed."""
    # 1. Model parallelism: what a module computes changes before anything is wrapped around it.
    adapter.apply_model_parallel(module, mesh)
    # 2. Recompute inside the graph that is compiled; 3. compile inside the hooks that gather parameters.
    apply_recompute(adapter.recompute_regions(module, plan))
    if plan.compile:
        apply_compile(adapter.blocks(module))
    # 4. Shard last: it sees the final parameters.
    policy = partial(precision.mixed_precision_policy, dtypes)
    apply_fsdp(
        module,
        adapter.fsdp_units(module, mesh),
        mesh.fsdp_mesh,
        policy,
        policy(adapter.root),
        plan.resolved_reshard_after_forward,
        average=average_gradients,
    )


def _loss(
    logits_BSV: Tensor,
    targets_BS: Tensor,
    counted: Tensor | None,
    *,
    tokens: int,
    vocabulary: int,
    tensor_group: torch.distributed.ProcessGroup | None,
) -> Tensor:
    """This rank's share of the mean loss; logits may be sharded by vocabulary over the tensor-parallel ranks."""
    group = None if logits_BSV.shape[-1] == vocabulary else tensor_group
    if counted is None:
        return cross_entropy_sum(logits_BSV, targets_BS, group) / tokens
    return cross_entropy_sum(logits_BSV, targets_BS, group, masked=True) / counted.clamp(min=1)
