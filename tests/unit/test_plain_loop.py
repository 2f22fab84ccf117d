"""The loop of a run at one process equals a plain PyTorch loop, written out in `plain_loop.py`.

Every comparison of layouts runs `framework.loop.train` on both sides, where a fault of the loop itself cannot show.
"""

from collections.abc import Iterator

import brought
import pytest
import torch
from deviations import relative, whole_parameters, worst
from made_loops import MOE, SHAPE, Run, one_rank, own, recipe, samples_of
from plain_loop import PlainRun, train_plainly
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from danlu.framework.state import TrainState
from danlu.spec.model import Model
from danlu.spec.plan import Plan
from danlu.spec.recipe import BatchConfig, BatchRampStage, LRSchedule, OptimizerConfig, Recipe
from danlu.spec.recompute import RecomputeLayers

BAR = 1e-5
SHARPER = OptimizerConfig(learning_rate=1e-2, epsilon=1e-5, weight_decay=0.5, clip=1.0)
"""Gradients of small batches are longer."""
RAMP = BatchConfig(
    sequences=8,
    length=16,
    ramp=(BatchRampStage(until=2, sequences=2), BatchRampStage(until=5, sequences=4)),
)


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with one_rank():
        yield


def check_same(run: Run, plain: PlainRun) -> None:
    """Losses, norms, learning rates, parameters, AdamW's moments and the routers' biases."""
    reports, state = run.reports, run.state
    taken = [report for report in reports if report.committed]
    assert [report.committed for report in reports] == plain.taken
    kept = [step for step, each in enumerate(plain.taken) if each]
    assert relative([report.loss for report in taken], [plain.losses[step] for step in kept]) <= BAR
    assert relative([report.norm for report in taken], [plain.norms[step] for step in kept]) <= BAR
    assert relative([report.learning_rate for report in reports], plain.rates) <= 1e-12
    found = whole_parameters(state)
    expected = {name: parameter.detach() for name, parameter in run.plain.named_parameters()}
    assert found.keys() == expected.keys()
    assert worst(float((found[name] - expected[name]).abs().max()) for name in found) <= BAR
    moments = {name: _moment(state, parameter) for name, parameter in state.named_parameters()}
    for name, moment in plain.moments.items():
        torch.testing.assert_close(moments[name], moment, rtol=1e-3, atol=1e-9)
    for name, buffer in run.plain.named_buffers():
        if name.endswith("bias_E"):
            assert torch.equal(state.stage_modules[0].get_buffer(name), buffer), name
    batch, tokens = run.made.batch, [report.tokens for report in reports]
    assert (state.step, state.cursor) == (run.made.steps, sum(tokens) // batch.length)
    assert batch.ramp or tokens == [batch.tokens] * run.made.steps


def _moment(state: TrainState, parameter: nn.Parameter) -> Tensor:
    moment = state.optimizer.state[parameter]["exp_avg_sq"]
    return moment.full_tensor() if isinstance(moment, DTensor) else moment


CASES: dict[str, tuple[Recipe, Plan]] = {
    "dense": (recipe(Model(**SHAPE)), Plan()),
    "dense, accumulate 4": (recipe(Model(**SHAPE)), Plan(microbatches=4)),
    "experts balanced by bias": (recipe(Model(**SHAPE, moe=MOE)), Plan()),
    "experts balanced by bias, accumulate 4": (recipe(Model(**SHAPE, moe=MOE)), Plan(microbatches=4)),
    "a module with dropout": (recipe(own("PlainModel", layers=2, dropout=0.2)), Plan()),
    "a module with dropout, accumulate 4": (recipe(own("PlainModel", layers=2, dropout=0.2)), Plan(microbatches=4)),
    "a module with dropout, recompute": (recipe(own("PlainModel", layers=2, dropout=0.2)), Plan(recompute="full")),
    "a module with dropout, recompute by layer": (
        recipe(own("PlainModel", layers=2, dropout=0.2)),
        Plan(recompute=RecomputeLayers(selective="0", full="1")),
    ),
    "a batch that grows": (recipe(Model(**SHAPE), batch=RAMP, optimizer=SHARPER), Plan(microbatches=4)),
    "a batch that grows, experts": (
        recipe(Model(**SHAPE, moe=MOE), batch=RAMP, optimizer=SHARPER),
        Plan(microbatches=8),
    ),
    "a module with dropout, a batch that grows": (
        recipe(own("PlainModel", layers=2, dropout=0.2), batch=RAMP, optimizer=SHARPER),
        Plan(microbatches=4),
    ),
    "decay as a root": (
        recipe(Model(**SHAPE), schedule=LRSchedule(kind="wsd", warmup=2, decay=4, shape="1-sqrt")),
        Plan(),
    ),
    "constant": (recipe(Model(**SHAPE), schedule=LRSchedule(kind="constant")), Plan()),
    "linear": (recipe(Model(**SHAPE), schedule=LRSchedule(kind="linear", warmup=2, final=0.0)), Plan()),
    "warm-up, stable, decay": (recipe(Model(**SHAPE), schedule=LRSchedule(kind="wsd", warmup=2, decay=4)), Plan()),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_equals_a_plain_loop(name: str) -> None:
    made, plan = CASES[name]
    run = Run(made, plan, samples_of(made))
    plain = train_plainly(made, run.plain, run.samples, plan.microbatches)
    run.train()
    check_same(run, plain)
    assert min(plain.norms) < made.optimizer.clip < max(plain.norms), "some steps are clipped and some are not"


def test_dropout_and_bias_make_a_difference() -> None:
    """What the cases above compare is not zero: masks differ between steps and layers, and biases move."""
    made, plan = CASES["experts balanced by bias"]
    run = Run(made, plan, samples_of(made))
    run.train()
    assert all(
        buffer.abs().max() > 0 for name, buffer in run.state.stage_modules[0].named_buffers() if "bias_E" in name
    )
    with_dropout, without = (
        Run(each, Plan(), samples_of(each))
        for each in (recipe(own("PlainModel", layers=2, dropout=rate), steps=2) for rate in (0.2, 0.0))
    )
    with_dropout.train()
    without.train()
    assert abs(with_dropout.reports[0].norm - without.reports[0].norm) > 1e-3


def test_a_batch_that_overflows_is_left_out() -> None:
    """Sample 19 is of the third step, 40 of the sixth: both are skipped, the others are as if they had not been."""
    made = recipe(own("Overflowing", layers=2))
    samples = samples_of(made, poison=brought.POISON, poisoned=(19, 40))
    run = Run(made, Plan(), samples)
    plain = train_plainly(made, run.plain, samples)
    assert [step for step, taken in enumerate(plain.taken) if not taken] == [2, 5]
    run.train()
    check_same(run, plain)
