"""Train in a test as the product does, with the reports kept in memory."""

from collections.abc import Callable
from pathlib import Path

import torch

from danlu.comm.mesh import build_mesh
from danlu.framework.build import build
from danlu.framework.feed import Feed
from danlu.framework.loop import train
from danlu.framework.state import TrainState
from danlu.spec.cluster import Cluster
from danlu.spec.event import StepReport
from danlu.spec.plan import Plan
from danlu.spec.recipe import Recipe, has_experts
from danlu.storage.tokens import Dataset, TokenShards


def train_in_memory(
    recipe: Recipe,
    plan: Plan,
    rank: int,
    restore: Callable[[TrainState], None] = lambda state: None,
    stop_at: int | None = None,
    cluster: Cluster | None = None,
) -> tuple[list[StepReport], TrainState]:
    """Build, restore if asked to, and train to the recipe's end or to step `stop_at`."""
    mesh = build_mesh(plan, torch.device("cpu"), rank, cluster, experts=has_experts(recipe.model))
    state, forward_backward = build(recipe, plan, mesh)
    restore(state)
    shards = TokenShards.open(Path(recipe.data.shards))
    feed = Feed(Dataset(shards, recipe.batch.length, recipe.seed), recipe.batch, recipe.model.vocabulary, mesh)
    reports: list[StepReport] = []
    train(
        recipe,
        state,
        forward_backward,
        feed,
        mesh,
        memory_peak=lambda: 0,
        report=reports.append,
        maybe_save=lambda state, last: None,
        stop=lambda: stop_at is not None and state.step + 1 >= stop_at,
    )
    return reports, state
