"""A save that goes on while training does holds the state of the step it is named after."""

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from made_loops import MOE, SHAPE, Run, one_rank, own, recipe, samples_of
from torch import Tensor

from danlu.comm.world import World
from danlu.framework.checkpoint_manager import CheckpointManager
from danlu.framework.stages import IgnoreEvents
from danlu.framework.state import TrainState
from danlu.spec.custom_model import CustomModel
from danlu.spec.model import Model
from danlu.spec.plan import Plan
from danlu.spec.recipe import CheckpointConfig
from danlu.storage.checkpoint import async_saver
from danlu.storage.checkpoint.engine import open_checkpoint_engine
from danlu.storage.checkpoint.staging import PackPlan, snapshot


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with one_rank():
        yield


@pytest.mark.parametrize("model", [own("Counting", layers=1), Model(**SHAPE, moe=MOE)], ids=["module", "experts"])
def test_a_slow_copy_saves_the_step_it_is_named_after(
    model: Model | CustomModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy begins as late as it may: when the loop waits for it, or, if it does not, after the update."""
    may_copy = threading.Event()

    def slow_stage(plan: PackPlan, tensors: Mapping[str, Tensor], into: memoryview) -> object:
        assert may_copy.wait(30)
        return snapshot(plan, tensors, into)

    monkeypatch.setattr(async_saver, "snapshot", slow_stage)
    made = recipe(model, steps=4, checkpoint=CheckpointConfig(every=1, keep=9))
    run = Run(made, Plan(), samples_of(made))
    checkpoints = open_checkpoint_engine(tmp_path / "saved", 9, World.adopt())
    states: dict[int, dict[str, Tensor]] = {}
    update = run.state.optimizer_step

    class SlowCheckpoints(CheckpointManager):
        def save_if_due(self, state: TrainState, last: bool) -> bool:
            states[state.step] = {name: tensor.detach().clone() for name, tensor in state.tensors().items()}
            checkpoints.wait_for_saves()  # a slow disk would have a save skipped
            may_copy.set() if last else may_copy.clear()
            return super().save_if_due(state, last)

        def wait_for_staging(self) -> None:
            may_copy.set()
            super().wait_for_staging()

    def late_update(learning_rate: float) -> None:
        update(learning_rate)
        may_copy.set()

    monkeypatch.setattr(run.state, "optimizer_step", late_update)
    run.train(SlowCheckpoints(checkpoints, made.checkpoint, 0, IgnoreEvents()))
    assert sorted(states) == [1, 2, 3, 4]
    for step, expected in states.items():
        tensors = run.state.tensors()
        scalars, _ = checkpoints.load(step, tensors)
        assert scalars["step"] == step
        for name, tensor in expected.items():
            assert torch.equal(tensors[name], tensor), f"{name} of step {step}"
    checkpoints.close()
