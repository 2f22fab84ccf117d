"""The average of the parameters: what a plain loop computes, saved and restored with the rest."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from made_loops import SHAPE, Run, one_rank, recipe, samples_of
from torch import Tensor
from torch.distributed.tensor import DTensor

from danlu.cost.parallel_layout import ParallelLayout
from danlu.cost.software import DANLU
from danlu.cost.step_prediction import Predictor
from danlu.dryrun.dry_run import dry_run_rank
from danlu.framework.state import TrainState
from danlu.spec.load import load_cluster, load_model
from danlu.spec.model import Model
from danlu.spec.plan import Degrees, Plan
from danlu.spec.recipe import BatchConfig, DataConfig, EmaConfig, Recipe

DECAY = 0.75


@pytest.fixture
def _one_rank() -> Iterator[None]:
    with one_rank():
        yield


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Following(TrainState):
    """Computes the average again after every step, in fp64."""

    means: dict[str, Tensor]

    def optimizer_step(self, learning_rate: float) -> None:
        if not hasattr(self, "means"):
            self.means = {name: full(each).double() for name, each in self.named_parameters()}
        super().optimizer_step(learning_rate)
        for name, each in self.named_parameters():
            self.means[name] = DECAY * self.means[name] + (1 - DECAY) * full(each).double()


@pytest.mark.usefixtures("_one_rank")
def test_the_average_is_that_of_a_plain_loop_and_changes_no_step() -> None:
    made = recipe(Model(**SHAPE), ema=EmaConfig(decay=DECAY))
    bare = recipe(Model(**SHAPE))
    run, without = Run(made, Plan(), samples_of(made)), Run(bare, Plan(), samples_of(bare))
    run.state.__class__ = Following
    run.train()
    without.train()
    assert [report.loss for report in run.reports] == [report.loss for report in without.reports]
    state = run.state
    assert isinstance(state, Following) and state.ema is not None
    assert state.ema.updates == made.steps
    saved = state.tensors()
    for name, mean in state.means.items():
        torch.testing.assert_close(full(saved[f"ema.{name}"]).double(), mean, rtol=1e-6, atol=1e-7)
    parameters = dict(state.named_parameters())
    assert all(not torch.equal(full(saved[f"ema.{name}"]), full(each)) for name, each in parameters.items())
    assert not any(name.startswith("ema.") for name in without.state.tensors())


@pytest.mark.usefixtures("_one_rank")
def test_a_resumed_run_continues_the_average() -> None:
    made = recipe(Model(**SHAPE), ema=EmaConfig(decay=DECAY))
    first, second = (Run(made, Plan(), samples_of(made)) for _ in range(2))
    half = made.model_copy(update={"steps": 4})
    first.made = half
    first.train()
    saved = {name: full(tensor) for name, tensor in first.state.tensors().items()}
    for name, tensor in second.state.tensors().items():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().copy_(saved[name])
    second.state.restore_scalars(first.state.scalars())
    assert second.state.ema is not None and second.state.ema.updates == 4
    first.made = made
    first.train()
    second.train()
    expected = first.state.tensors()
    for name, tensor in second.state.tensors().items():
        assert torch.equal(full(tensor), full(expected[name])), name


def test_the_plan_and_the_dry_run_know_its_memory() -> None:
    model, pod = load_model("llama3-8b").model_copy(update={"layers": 2}), load_cluster("h100-pod")
    batch = BatchConfig(sequences=8, length=512)
    with_ema, bare = (
        Predictor(model, batch, pod, replace(DANLU, ema=ema)).predict(ParallelLayout(shard=8)) for ema in (True, False)
    )
    more = with_ema.memory.optimizer - bare.memory.optimizer
    assert with_ema.parts["optimizer"] > bare.parts["optimizer"]
    traces = [
        dry_run_rank(
            Recipe(name="dry", steps=1, model=model, data=DataConfig(shards="none"), batch=batch, ema=ema),
            Plan(degrees=Degrees(shard=8)),
            None,
            rank=0,
        )
        for ema in (EmaConfig(), None)
    ]
    assert traces[0].peak.total - traces[1].peak.total == pytest.approx(more, rel=0.01)
