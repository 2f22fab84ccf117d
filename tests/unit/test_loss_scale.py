"""fp16: the loss is scaled, overflows are skipped and are no divergence, and the scale is part of the state."""

from collections.abc import Iterator
from itertools import pairwise
from math import inf, nan

import pytest
import torch
from deviations import relative, whole_parameters
from made_loops import MOE, SHAPE, Run, one_rank, recipe, samples_of

from danlu.framework.loss_scale import MAX_SCALE, MIN_SCALE, LossScaler, build_loss_scaler
from danlu.framework.step_guard import DivergedError, StepGuard
from danlu.framework.step_metrics import StepMetrics
from danlu.spec.model import Model
from danlu.spec.plan import Plan
from danlu.spec.recipe import LayerPrecision, LossScaleConfig, PrecisionConfig

FP16 = PrecisionConfig(compute="fp16")


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with one_rank():
        yield


def trained(precision: PrecisionConfig, moe: bool = False) -> Run:
    model = Model(**SHAPE, moe=MOE.model_copy(update={"balance": "loss"}) if moe else None)
    made = recipe(model, precision=precision)
    run = Run(made, Plan(microbatches=2), samples_of(made))
    run.train()
    return run


def test_a_run_in_fp16_learns_as_one_in_fp32() -> None:
    half, full = trained(FP16), trained(PrecisionConfig())
    assert half.state.loss_scaler is not None and full.state.loss_scaler is None
    taken = [report for report in half.reports if report.committed]
    assert len(taken) == len(half.reports), "the usual scale overflows nothing here"
    assert relative([report.loss for report in half.reports], [report.loss for report in full.reports]) < 5e-3
    assert relative([report.norm for report in half.reports], [report.norm for report in full.reports]) < 5e-2
    assert {report.loss_scale for report in half.reports} == {65536.0}
    assert {report.loss_scale for report in full.reports} == {None}


@pytest.mark.parametrize("moe", [False, True])
def test_scaling_loses_no_bit(moe: bool) -> None:
    """Only gradients of the head are rounded to fp16, after the last layer: all others are exact, experts' loss too."""
    head = PrecisionConfig(layers=(LayerPrecision(match="head", compute="fp32", reduce="fp16"),))
    bare = PrecisionConfig(layers=(LayerPrecision(match="head", compute="fp32"),))
    model = Model(**SHAPE, moe=MOE.model_copy(update={"balance": "loss", "balance_rate": 1.0}) if moe else None)
    found = []
    for precision in (head, bare):
        made = recipe(model, precision=precision, steps=1)
        made = made.model_copy(update={"optimizer": made.optimizer.model_copy(update={"clip": 0.0})})
        run = Run(made, Plan(), samples_of(made))
        run.train()
        found.append(whole_parameters(run.state))
    for name, value in found[0].items():
        if not name.startswith("head."):
            assert torch.equal(value, found[1][name]), name


def test_small_gradients_survive() -> None:
    """Gradients of which many are zero in fp16, because a scale makes them small, are far less exact."""
    tiny = LossScaleConfig(growth_interval=1000).model_copy(update={"initial": 2.0**-14})
    scaled, bare = trained(FP16), trained(FP16.model_copy(update={"loss_scale": tiny}))
    full = trained(PrecisionConfig())

    def error(run: Run) -> float:
        return sum(abs(a.norm - b.norm) for a, b in zip(run.reports, full.reports, strict=True))

    assert error(scaled) <= 0.1 * error(bare)


def test_overflows_are_skipped_until_the_scale_fits_and_are_no_divergence() -> None:
    run = trained(FP16.model_copy(update={"loss_scale": LossScaleConfig(initial=2.0**20)}))
    committed = [report.committed for report in run.reports]
    assert True in committed and False in committed
    scales = [report.loss_scale or nan for report in run.reports]
    assert scales[0] == 2.0**20
    for (before, after), taken in zip(pairwise(scales), committed, strict=False):
        assert after == (before if taken else before / 2)
    guard = StepGuard(patience=3)
    for step in range(20):
        assert not guard.judge(1.0, inf, step, overflow=True).applied
    guard.raise_if_diverged(1.0, inf, 20)
    for step in range(20, 23):
        assert not guard.judge(1.0, nan, step, overflow=False).applied
    with pytest.raises(DivergedError):
        guard.raise_if_diverged(1.0, nan, 23)


def metrics(norm: float) -> StepMetrics:
    return StepMetrics(loss=1.0, norm=norm, memory=0, imbalance=None, stop_requested=False)


def test_the_scale_halves_and_doubles_within_its_bounds() -> None:
    scaler = LossScaler(LossScaleConfig(initial=8.0, growth_interval=3))
    for _ in range(3):
        scaler.update(metrics(1.0))
    assert (scaler.scale, scaler.good_steps) == (16.0, 0)
    scaler.update(metrics(1.0))
    scaler.update(metrics(inf))
    assert (scaler.scale, scaler.good_steps) == (8.0, 0)
    for _ in range(10):
        scaler.update(metrics(inf))
    assert scaler.scale == MIN_SCALE and not scaler.can_back_off
    for _ in range(3 * 40):
        scaler.update(metrics(1.0))
    assert scaler.scale == MAX_SCALE


def test_the_scale_is_part_of_the_state() -> None:
    run = trained(FP16.model_copy(update={"loss_scale": LossScaleConfig(initial=2.0**12, growth_interval=3)}))
    scalars = run.state.scalars()
    assert (scalars["loss_scale"], scalars["loss_scale_good_steps"]) == (2.0**14, 2)
    other = build_loss_scaler(FP16)
    assert other is not None
    other.restore(scalars)
    assert other.scalars() == {"loss_scale": 2.0**14, "loss_scale_good_steps": 2}
    other.restore({"step": 3})
    assert other.scale == 65536.0
