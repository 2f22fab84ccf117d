"""One function that turns a recipe and a plan into a trainable model; its order is its documentation."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from danlu.comm.mesh import ParallelMesh
from danlu.compiler.blocks import apply_compile
from danlu.framework import precision
from danlu.framework.batch_ramp import RampedPasses
from danlu.framework.custom.adapter import CustomModelAdapter
from danlu.framework.decoder.adapter import DecoderAdapter
from danlu.framework.decoder.mtp import MtpModule
from danlu.framework.ema import ParameterEma
from danlu.framework.fp8.apply import apply_block_scaling
from danlu.framework.gradient_accumulation import GradientAccumulation
from danlu.framework.loss_scale import LossScaler, build_loss_scaler
from danlu.framework.model_adapter import LayoutAdapter, ModelAdapter
from danlu.framework.mtp_passes import MtpPasses
from danlu.framework.optimizer import build_optimizer
from danlu.framework.state import TrainState
from danlu.framework.step_guard import StepGuard
from danlu.memory.recompute import apply_recompute
from danlu.parallel.batch import Batch
from danlu.parallel.fsdp import apply_fsdp
from danlu.parallel.loss import MeanLoss, cross_entropy_sum
from danlu.parallel.pipeline import PipelineRunner
from danlu.spec.custom_model import CustomModel
from danlu.spec.plan import Plan
from danlu.spec.recipe import PrecisionConfig, Recipe


class ForwardBackward(Protocol):
    """Both passes of one step on this rank."""

    def __call__(self, batch: Batch, counted: Tensor | None = None) -> Tensor:
        """Leaves gradients, and returns this rank's share of the mean loss over the global batch.

        With multi-token prediction a vector, in which the losses of its modules follow.

        `counted` is how many targets of the global batch count (`all_reduce_counted`); None if all of them do.
        """
        ...


def make_adapter(recipe: Recipe, plan: Plan) -> ModelAdapter:
    """The adapter of a recipe's model: a described decoder, or a custom module."""
    return CustomModelAdapter(recipe, plan) if isinstance(recipe.model, CustomModel) else DecoderAdapter(recipe, plan)


def build_train_state(
    recipe: Recipe,
    plan: Plan,
    mesh: ParallelMesh,
    tensors: AbstractContextManager[object] | None = None,
    reproduce_in: Path | None = None,
) -> tuple[TrainState, ForwardBackward]:
    """Build this rank's stages of the model, parallel as the plan says, its optimizer, and its forward and backward.

    A dry run passes the context in which `tensors` are made; nothing before that takes memory. What reproduces a
    compiled block that differs from the eager one is written into the folder `reproduce_in`.
    """
    adapter = make_adapter(recipe, plan)
    stages = plan.stages_of_rank(mesh.coordinate("pp"))
    modules = [adapter.stage_module(stage) for stage in stages]
    for module in modules:
        apply_parallelism(module, adapter, plan, mesh, recipe.precision, reproduce_in=reproduce_in)
    with tensors or nullcontext():
        adapter.init_weights(modules, mesh)
    scaler = build_loss_scaler(recipe.precision)
    passes = partial(_passes, recipe, plan, mesh, adapter, modules, scaler)
    forward_backward: ForwardBackward
    if recipe.batch.ramp:
        forward_backward = RampedPasses(recipe.batch, plan, passes, modules, adapter.layer_seeds)
    else:
        forward_backward = passes(plan.microbatches, recipe.batch.tokens)
    blocks = [block for module in modules for block in adapter.blocks(module)]
    blocks += [each.project for module in modules for each in module.modules() if isinstance(each, MtpModule)]
    state = TrainState(
        modules,
        build_optimizer(modules, recipe.optimizer, blocks, over_replicas=plan.shard_optimizer_over_replicas),
        recipe.seed,
        layer_seeds=adapter.layer_seeds,
        guard=StepGuard(recipe.spikes),
        loss_scaler=scaler,
    )
    if recipe.ema:
        state.ema = ParameterEma(recipe.ema.decay, state.named_parameters())
    return state, forward_backward


def _passes(
    recipe: Recipe,
    plan: Plan,
    mesh: ParallelMesh,
    adapter: ModelAdapter,
    modules: list[nn.Module],
    scaler: LossScaler | None,
    microbatches: int,
    tokens: int,
) -> ForwardBackward:
    """Forward and backward of a global batch of `tokens`, in so many microbatches on this rank."""
    loss: MeanLoss = partial(_loss, tokens=tokens, vocabulary=recipe.model.vocabulary, tensor_group=mesh.group("tp"))
    if plan.loss_chunks > 1:
        loss = partial(_mean, tokens=tokens)
    if scaler:
        loss = partial(_scaled, loss, scaler)
    passes = _main_passes(plan, mesh, adapter, modules, loss, microbatches)
    if recipe.mtp is None:
        return passes
    return MtpPasses(passes, recipe.mtp, modules, mesh, tokens // recipe.batch.length, recipe.batch.length)


def _main_passes(
    plan: Plan, mesh: ParallelMesh, adapter: ModelAdapter, modules: list[nn.Module], loss: MeanLoss, microbatches: int
) -> ForwardBackward:
    """The same, as far as the main loss needs it."""
    if plan.degrees.pp == 1:
        return GradientAccumulation(modules[0], loss, microbatches, plan)
    group, stages = mesh.group("pp"), plan.stages_of_rank(mesh.coordinate("pp"))
    assert group is not None
    plan = plan.model_copy(update={"microbatches": microbatches})
    return PipelineRunner(plan, modules, stages, adapter.stage_io_meta, loss, mesh.device, group)


def _scaled(loss: MeanLoss, scaler: LossScaler, logits: Tensor, targets: Tensor, counted: Tensor | None) -> Tensor:
    """The loss times the scale of this step."""
    return scaler.apply(loss(logits, targets, counted))


def apply_parallelism(
    module: nn.Module,
    adapter: LayoutAdapter,
    plan: Plan,
    mesh: ParallelMesh,
    dtypes: PrecisionConfig,
    average_gradients: bool = False,
    reproduce_in: Path | None = None,
) -> None:
    """Apply every axis of the plan to one stage of the model, in the one order that works; gradients are summed."""
    # 1. Model parallelism: what a module computes changes before anything is wrapped around it.
    adapter.apply_model_parallel(module, mesh)
    apply_block_scaling(adapter.quantized_modules(module), dtypes, mesh.device)
    # 2. Recompute inside the graph that is compiled; 3. compile inside the hooks that gather parameters.
    apply_recompute(adapter.recompute_regions(module, plan))
    if plan.compile:
        # Ranks that compute the same sequences call the same blocks with the same shapes. Others may not: a module of
        # `transformers` has a mask on those ranks alone whose sequences are of several documents.
        experts_wait = plan.degrees.ep > 1 and plan.degrees.pp == 1
        agree = mesh.world.any_rank if experts_wait else mesh.any_of_sequence
        apply_compile(adapter.blocks(module), plan.check_compiled, agree, reproduce_in)
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
    return _mean(cross_entropy_sum(logits_BSV, targets_BS, group), targets_BS, counted, tokens=tokens)


def _mean(summed: Tensor, targets_BS: Tensor, counted: Tensor | None, *, tokens: int) -> Tensor:
    """The same of a sum over this rank's targets."""
    return summed / (tokens if counted is None else counted.clamp(min=1))
