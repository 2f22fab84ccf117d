"""Danlu in a loop of one's own, on one rank; several ranks are in tests/multiprocess/test_examples.py."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import made_modules
import numpy as np
import pytest
import torch
from torch import nn

import danlu
from danlu.comm.world import World
from danlu.framework.custom.construct import CustomModelError
from danlu.framework.step_guard import DivergedError
from danlu.spec.plan import Degrees, Plan

TOKENS = torch.arange(12).view(2, 6)


@pytest.fixture
def model() -> Iterator[nn.Module]:
    torch.manual_seed(0)
    yield danlu.parallelize(made_modules.Chain(), danlu.plan())
    World.adopt().shutdown()


@pytest.fixture
def alone() -> Iterator[None]:
    danlu.plan()  # joins
    yield
    World.adopt().shutdown()


def test_a_plan_by_name_by_file_or_by_default(tmp_path: Path, alone: None) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('recompute = "full"\n[degrees]\nshard = 4\n')
    assert danlu.plan(file) == danlu.plan(shard=4, recompute="full") == Plan(degrees=Degrees(shard=4), recompute="full")
    assert danlu.plan() == Plan()
    with pytest.raises(TypeError, match="a file or settings"):
        danlu.plan(file, tp=2)


def test_the_whole_module_is_never_moved_to_the_device(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharding moves parameters unit by unit, so that a model that fits only sharded fits."""

    def moved(module: nn.Module, *_: object, **__: object) -> nn.Module:
        pytest.fail(f"{type(module).__name__} was moved before it was sharded")

    monkeypatch.setattr(nn.Module, "_apply", moved)  # behind `to` and all its relatives
    danlu.parallelize(made_modules.Chain(), danlu.plan())


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(degrees=Degrees(pp=2)), r"degrees\.pp.*needs the step itself.*recipe"),
        (Plan(degrees=Degrees(cp=2)), r"degrees\.cp.*attention that exchanges heads"),
        (Plan(degrees=Degrees(ep=2)), r"degrees\.ep.*expert layers"),
        (Plan(microbatches=2), r"microbatches.*your loop takes the microbatches"),
        (Plan(reduce_gradients="step"), r"reduce_gradients.*your loop calls backward"),
        (Plan(loss_chunks=2), r"loss_chunks.*your loop computes the loss"),
        (Plan(dispatch_chunks=2), r"dispatch_chunks.*is 2, but your loop has no `ep`"),
        (Plan(token_dispatcher="deduplicated"), r"token_dispatcher.*has no `ep`"),
        (Plan(operators={"rotate": "torch"}), r"operators.*its own operators"),
        (Plan(shard_optimizer_over_replicas=True), r"shard_optimizer_over_replicas.*the optimizer is yours"),
        (Plan(degrees=Degrees(shard=2)), r"make 2 ranks, but 1 were started.*torchrun --nproc-per-node 2"),
    ],
)
def test_what_a_loop_cannot_have_is_said(plan: Plan, message: str, alone: None) -> None:
    with pytest.raises(CustomModelError, match=message):
        danlu.parallelize(made_modules.Chain(), plan)


def test_a_module_that_was_not_laid_out_has_no_mesh() -> None:
    with pytest.raises(ValueError, match=r"must have come from danlu\.parallelize"):
        danlu.shard_batch(TOKENS, made_modules.Chain())


def test_an_order_visits_every_sample_once(model: nn.Module) -> None:
    order = danlu.StepSampler(samples=12, batch=4, model=model, seed=3)
    first = np.concatenate([order.at(step) for step in range(3)])
    assert sorted(first) == list(range(12))
    assert not np.array_equal(first, np.concatenate([order.at(step) for step in range(3, 6)]))
    assert torch.equal(danlu.shard_batch(TOKENS, model), TOKENS)


def test_the_guard_takes_only_finite_steps_and_gives_up(model: nn.Module) -> None:
    guard = danlu.Guard(model, clip=1e-3, patience=2)
    loss = model(TOKENS).square().mean()
    loss.backward()
    assert guard.commit(loss)
    assert guard.loss == pytest.approx(loss.item())
    norm = sum(float(p.grad.to_local().square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5
    assert norm == pytest.approx(1e-3, rel=1e-3), "clipped"
    assert guard.norm > norm
    bad = torch.tensor(float("nan"))
    assert not guard.commit(bad)
    with pytest.raises(DivergedError, match="2 steps"):
        guard.commit(bad)


def test_a_signal_becomes_a_wish_to_stop(model: nn.Module) -> None:
    with danlu.Guard(model) as guard:
        assert guard.commit(torch.zeros(()))
        assert not guard.stop
        os.kill(os.getpid(), signal.SIGTERM)
        guard.commit(torch.zeros(()))
        assert guard.stop


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_checkpoint_brings_back_module_and_optimizer(
    kind: type[torch.optim.Optimizer], model: nn.Module, tmp_path: Path
) -> None:
    settings = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.1, **settings)  # type: ignore[call-arg]

    def step() -> torch.Tensor:
        loss = model(TOKENS).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    checkpoints = danlu.Checkpointer(tmp_path, model, optimizer)
    assert checkpoints.load() == 0
    step()
    checkpoints.save(1)
    straight = [step(), step()]
    assert checkpoints.load() == 1
    assert [step(), step()] == straight
