"""Train in a test as the product does, with the reports kept in memory."""

from collections.abc import Callable
from pathlib import Path

from danlu.comm.mesh import build_mesh
from danlu.comm.world import World
from danlu.framework.batch_loader import BatchLoader
from danlu.framework.build import build_train_state
from danlu.framework.loop import TrainStages, run_training_loop
from danlu.framework.stages import FixedData
from danlu.framework.state import TrainState
from danlu.spec.cluster import Cluster
from danlu.spec.event import Event, StepEvent
from danlu.spec.plan import Plan
from danlu.spec.recipe import Recipe, has_experts
from danlu.storage.data.token_shards import ShuffledDataset, TokenShards


class KeptSteps:
    """Keeps the events of steps in a list."""

    def __init__(self, steps: list[StepEvent]) -> None:
        self.steps = steps

    def write(self, event: Event) -> None:
        assert isinstance(event, StepEvent)
        self.steps.append(event)

    def warn(self, message: str) -> None:
        raise AssertionError(message)


def train_in_memory(
    recipe: Recipe,
    plan: Plan,
    rank: int,
    restore: Callable[[TrainState], None] = lambda state: None,
    stop_at: int | None = None,
    cluster: Cluster | None = None,
) -> tuple[list[StepEvent], TrainState]:
    """Build, restore if asked to, and train to the recipe's end or to step `stop_at`."""
    mesh = build_mesh(plan, World.adopt(), cluster, experts=has_experts(recipe.model))
    state, forward_backward = build_train_state(recipe, plan, mesh)
    restore(state)
    shards = TokenShards.open(Path(recipe.data.shards))
    batches = BatchLoader(
        ShuffledDataset(shards, recipe.batch.length, recipe.seed),
        recipe.batch,
        recipe.model.vocabulary,
        mesh,
        document_mask=recipe.data.document_mask,
        loss_mask=shards.index.has_loss_mask,
        tokens_ahead=recipe.mtp.depth if recipe.mtp else 0,
    )
    reports: list[StepEvent] = []
    stages = TrainStages(
        FixedData(batches),
        forward_backward,
        events=KeptSteps(reports),
        stop_requested=lambda: stop_at is not None and state.step + 1 >= stop_at,
    )
    run_training_loop(recipe, state, mesh, stages)
    return reports, state
