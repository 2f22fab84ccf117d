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
from danlu.framework.blueprint import Blueprint
from danlu.framework.described import DescribedModel
from danlu.framework.optimizer import build_optimizer
from danlu.framework.own.blueprint import BroughtModel
from danlu.framework.state import TrainState
from danlu.memory.recompute import apply_recompute
from danlu.parallel.loss import cross_entropy_sum
from danlu.parallel.pipeline import Pipeline, rank_stages
from danlu.parallel.shard import apply_sharding
from danlu.spec.own_model import OwnModel
from danlu.spec.plan import Plan
from danlu.spec.recipe import Precision, Recipe

ForwardBackward = Callable[[Tensor, Tensor], Tensor]
"""Takes this rank's tokens and targets, leaves gradients, returns this rank's share of the mean loss."""


def blueprint_of(recipe: Recipe, plan: Plan) -> Blueprint:
    """The model of a recipe, whichever way it is said."""
    return BroughtModel(recipe, plan) if isinstance(recipe.model, OwnModel) else DescribedModel(recipe, plan)


def build(
    recipe: Recipe, plan: Plan, mesh: Mesh, tensors: AbstractContextManager[object] | None = None
) -> tuple[TrainState, ForwardBackward]:
    """Make this rank's part of the model, parallel as the plan says, with its optimiser and its way of one step.

    A dry run gives the context in which `tensors` are made; everything before that needs no memory anyway.
    """
    blueprint = blueprint_of(recipe, plan)
    stages = rank_stages(plan, mesh.coordinate("pp"))
    parts = [blueprint.part(stage) for stage in stages]
    for part in parts:
        parallelise(part, blueprint, plan, mesh, recipe.precision)
    with tensors or nullcontext():
        blueprint.fill(parts, mesh)
    loss = partial(_loss, tokens=recipe.batch.tokens, vocabulary=recipe.model.vocabulary, tensor_group=mesh.group("tp"))
    forward_backward: ForwardBackward
    if plan.degrees.pp > 1:
        group = mesh.group("pp")
        assert group is not None
        forward_backward = Pipeline(plan, parts, stages, blueprint.streams, loss, mesh.device, group)
    else:
        forward_backward = Accumulation(parts[0], loss, plan.microbatches)
    return TrainState(parts, build_optimizer(parts, recipe.optimizer), recipe.seed), forward_backward


def parallelise(part: nn.Module, blueprint: Blueprint, plan: Plan, mesh: Mesh, dtypes: Precision) -> None:
    """Apply every axis of the plan to one part of the model, in the one order that works."""
    # 1. Split layers: what a module computes changes before anything is wrapped around it.
    blueprint.split(part, mesh)
    # 2. Recompute inside the graph that is compiled; 3. compile inside the hooks that gather parameters.
    if plan.recompute != "none":
        apply_recompute(blueprint.regions(part, plan.recompute), plan.recompute)
    if plan.compile:
        apply_compile(blueprint.blocks(part))
    # 4. Shard last: it sees the final parameters.
    policy = partial(precision.policy, dtypes)
    rest = policy(blueprint.rest)
    apply_sharding(part, blueprint.units(part, mesh), mesh.parameters, policy, rest, plan.reshards)


def _loss(
    scores_BSV: Tensor,
    targets_BS: Tensor,
    tokens: int,
    vocabulary: int,
    tensor_group: torch.distributed.ProcessGroup | None,
) -> Tensor:
    """This rank's share of the mean loss; scores may be whole, or split over the ranks that share the matrices."""
    group = None if scores_BSV.shape[-1] == vocabulary else tensor_group
    return cross_entropy_sum(scores_BSV, targets_BS, group) / tokens
