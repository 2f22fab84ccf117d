"""Runs of the product's own loop at one process, which a plain loop can start from as well."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import brought
import torch
from deviations import whole_parameters
from plain_loop import RandomRows
from torch import nn
from training import KeptSteps

from danlu.comm.mesh import build_mesh
from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.framework.batch_loader import BatchLoader
from danlu.framework.build import build_train_state
from danlu.framework.decoder.decoder import Decoder
from danlu.framework.loop import TrainStages, run_training_loop
from danlu.framework.stages import CheckpointStage, FixedData, NoCheckpoints
from danlu.spec.custom_model import CustomModel
from danlu.spec.event import StepEvent
from danlu.spec.model import Model, Moe
from danlu.spec.plan import Plan
from danlu.spec.recipe import BatchConfig, DataConfig, LRSchedule, OptimizerConfig, Recipe, has_experts

MOE = Moe(experts=4, top_k=2, width=16, balance="bias", balance_rate=0.02)
SHAPE: dict[str, Any] = {"vocabulary": 64, "layers": 2, "width": 32, "heads": 4, "mlp_width": 48, "sequence": 32}


@contextmanager
def one_rank() -> Iterator[None]:
    """Be the only rank of a world."""
    world = World.join(RankInfo(), "gloo", rendezvous(RankInfo()))
    try:
        yield
    finally:
        world.shutdown()


def recipe(model: Model | CustomModel, **changes: Any) -> Recipe:
    """Settings under which every part of the loop matters: warm-up, decay, and a limit that some steps exceed."""
    settings: dict[str, Any] = {
        "name": "plain",
        "seed": 11,
        "steps": 8,
        "model": model,
        "data": DataConfig(shards="none"),
        "batch": BatchConfig(sequences=8, length=16),
        "optimizer": OptimizerConfig(learning_rate=1e-2, epsilon=1e-5, weight_decay=0.5, clip=0.8),
        "schedule": LRSchedule(kind="cosine", warmup=3, final=0.2),
    }
    return Recipe(**settings | changes)


def own(factory: str, **arguments: Any) -> CustomModel:
    return CustomModel(
        factory=f"brought:{factory}",
        path=str(Path(brought.__file__).parent),
        arguments=arguments,
        vocabulary=brought.VOCABULARY,
    )


def samples_of(made: Recipe, **settings: Any) -> RandomRows:
    return RandomRows(made.model.vocabulary, made.batch.length, **settings)


class Run:
    """A run of the product's own loop at one process, which a plain one can start from as well."""

    def __init__(self, made: Recipe, plan: Plan, samples: RandomRows) -> None:
        self.made, self.samples = made, samples
        self.mesh = build_mesh(plan, World.adopt(), None, experts=has_experts(made.model))
        self.state, self.forward_backward = build_train_state(made, plan, self.mesh)
        self.feed = BatchLoader(samples, made.batch, made.model.vocabulary, self.mesh)
        self.plain = self._same_model()
        self.reports: list[StepEvent] = []

    def _same_model(self) -> nn.Module:
        """A module of its own with the values that the run starts from."""
        model = self.made.model
        plain = Decoder(model) if isinstance(model, Model) else getattr(brought, model.factory[8:])(**model.arguments)
        with torch.no_grad():
            for name, value in whole_parameters(self.state).items():
                plain.get_parameter(name).copy_(value)
            for buffer in plain.buffers():
                buffer.nan_to_num_(0.0)  # those of a router are not given values by its constructor alone
        return plain

    def train(self, checkpoints: CheckpointStage | None = None, stop_after: int | None = None) -> None:
        stages = TrainStages(
            FixedData(self.feed),
            self.forward_backward,
            checkpoints or NoCheckpoints(),
            events=KeptSteps(self.reports),
            stop_requested=lambda: self.state.step + 1 == stop_after,
        )
        run_training_loop(self.made, self.state, self.mesh, stages)
