"""One function that turns a recipe and a plan into a trainable model; its order is its documentation."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from danlu.comm.mesh import Mesh
from danlu.compiler.blocks import apply_compile
from danlu.framework import precision
from danlu.framework.accumulate import Accumulation
from danlu.framework.initialise import initialise
from danlu.framework.optimizer import build_optimizer
from danlu.framework.placements import moe_layers, recompute_regions, sharding_units, tensor_placements
from danlu.framework.state import TrainState
from danlu.framework.transformer import Decoder
from danlu.memory.recompute import apply_recompute
from danlu.parallel.context import apply_cp
from danlu.parallel.expert import apply_ep
from danlu.parallel.loss import cross_entropy_sum
from danlu.parallel.pipeline import Pipeline, rank_stages
from danlu.parallel.shard import apply_sharding
from danlu.parallel.tensor import apply_tp
from danlu.spec.plan import Plan
from danlu.spec.recipe import Recipe

ForwardBackward = Callable[[Tensor, Tensor], Tensor]
"""Takes this rank's tokens and targets, leaves gradients, returns this rank's share of the mean loss."""


def build(
    recipe: Recipe, plan: Plan, mesh: Mesh, tensors: AbstractContextManager[object] | None = None
) -> tuple[TrainState, ForwardBackward]:
    """Make this rank's part of the model, parallel as the plan says, with its optimiser and its way of one step.

    A dry run gives the context in which `tensors` are made; everything before that needs no memory anyway.
    """
    stages = rank_stages(plan, mesh.coordinate("pp"))
    with torch.device("meta"):
        parts = [_decoder(recipe, plan, stage) for stage in stages]
    for part in parts:
        parallelise(part, recipe, plan, mesh)
    with tensors or nullcontext():
        for part in parts:
            part.to_empty(device=mesh.device)
            part.tie()
        initialise(parts, recipe.model, recipe.seed)
    loss = partial(_loss, tokens=recipe.batch.tokens, group=mesh.group("tp"))
    forward_backward: ForwardBackward
    if plan.degrees.pp > 1:
        streams = partial(_streams, recipe, plan)
        group = mesh.group("pp")
        assert group is not None
        forward_backward = Pipeline(plan, parts, stages, streams, loss, mesh.device, group)
    else:
        forward_backward = Accumulation(parts[0], loss, plan.microbatches)
    modules: list[nn.Module] = list(parts)
    return TrainState(modules, build_optimizer(parts, recipe.optimizer), recipe.seed), forward_backward


def parallelise(part: Decoder, recipe: Recipe, plan: Plan, mesh: Mesh) -> None:
    """Apply every axis of the plan to one part of the model, in the one order that works."""
    blocks = list(part.blocks.values())
    # 1. Split layers: what a module computes changes before anything is wrapped around it.
    if mesh.tensor is not None:
        apply_tp(part, tensor_placements(part), mesh.tensor)
    if group := mesh.group("cp"):
        apply_cp((block.get_submodule("attention") for block in blocks), group)
        if part.embed is not None:
            part.embed.part = mesh.coordinate("cp")
    if mesh.experts is not None:
        apply_ep(moe_layers(part), mesh.experts)
    for layer in moe_layers(part):
        layer.router.sequences_per_step = recipe.batch.sequences
        layer.router.sequence_group = mesh.group("cp", "tp")
    # 2. Recompute inside the graph that is compiled; 3. compile inside the hooks that gather parameters.
    if plan.recompute != "none":
        apply_recompute(recompute_regions(part, plan.recompute), plan.recompute)
    if plan.compile:
        apply_compile(blocks)
    # 4. Shard last: it sees the final parameters.
    part.tie()
    policy = partial(precision.policy, recipe.precision)
    apply_sharding(part, sharding_units(part, mesh), mesh.parameters, policy, plan.reshards)


def _decoder(recipe: Recipe, plan: Plan, stage: int) -> Decoder:
    layers = plan.stage_layers(recipe.model.layers)[stage]
    return Decoder(recipe.model, layers, first=stage == 0, last=stage == plan.stages - 1)


def _loss(scores_BSV: Tensor, targets_BS: Tensor, tokens: int, group: torch.distributed.ProcessGroup | None) -> Tensor:
    return cross_entropy_sum(scores_BSV, targets_BS, group) / tokens


def _streams(recipe: Recipe, plan: Plan, stage: int) -> tuple[Tensor, Tensor]:
    """Meta tensors like what enters and leaves a stage, for one microbatch on one rank."""
    degrees, model = plan.degrees, recipe.model
    sequences = recipe.batch.sequences // degrees.data // plan.microbatches
    length = recipe.batch.length // degrees.cp
    boundaries = plan.stage_layers(model.layers)

    def stream_after(stage: int) -> Tensor:
        layer = boundaries[stage][-1]
        dtype = precision.compute_dtype(recipe.precision, f"blocks.{layer}")
        return torch.empty(sequences, length // degrees.tp, model.width, dtype=dtype, device="meta", requires_grad=True)

    head = precision.compute_dtype(recipe.precision, "embed" if model.tied else "head")
    scores = torch.empty(
        sequences, length, model.vocabulary // degrees.tp, dtype=head, device="meta", requires_grad=True
    )
    tokens = torch.empty(sequences, length, dtype=torch.int64, device="meta")
    return (
        tokens if stage == 0 else stream_after(stage - 1),
        scores if stage == plan.stages - 1 else stream_after(stage),
    )
