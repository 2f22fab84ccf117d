"""The detector of spikes: arithmetic that another implementation confirms, and the guard that acts on it."""

import json
import random
from math import exp, inf, log, nan
from statistics import median
from typing import Any

import pytest

from danlu.framework.spike_detector import MIN_LOG_NORM_SIGMA, MIN_LOSS_SIGMA, SpikeDetector
from danlu.framework.step_guard import MAX_REWINDS, MAX_SKIPPED_STEPS, DivergedError, RewindCount, StepGuard
from danlu.spec.spikes import TREND_STEPS, SpikeConfig

CONFIG = SpikeConfig(policy="warn", window=64)
Values = list[tuple[float, float]]


def noisy(steps: int, seed: int = 1, noise: float = 0.02) -> Values:
    """A loss that falls from 6 to 2, and a norm that rises in a warm-up and falls after it."""
    draw = random.Random(seed)
    curve = []
    for step in range(steps):
        loss = 2 + 4 * exp(-step / 200) + draw.gauss(0, noise)
        curve.append((loss, min(1.0, (step + 1) / 40) * exp(draw.gauss(0, 0.15) - step / 2000)))
    return curve


def taught(values: Values, config: SpikeConfig = CONFIG) -> SpikeDetector:
    detector = SpikeDetector(config)
    for loss, norm in values:
        detector.accept(loss, norm)
    return detector


def by_definition(values: list[float]) -> tuple[float, float]:
    """Center and standard deviation, from all values at once."""
    levels = [median(values[at - TREND_STEPS : at]) for at in range(TREND_STEPS, len(values) + 1)]
    residuals = [value - level for value, level in zip(values[TREND_STEPS:], levels, strict=False)][-CONFIG.window :]
    middle = median(residuals)
    return levels[-1] + middle, median(abs(residual - middle) for residual in residuals) * 1.4826


@pytest.mark.parametrize("steps", [32, 60, 80, 333])
def test_limits_are_those_of_the_definition(steps: int) -> None:
    values = noisy(steps)
    detector = taught(values)
    center, sigma = by_definition([loss for loss, _ in values])
    sigma = max(sigma, MIN_LOSS_SIGMA * center)
    found = detector.find(100.0, 1.0)
    assert found is not None and found.metric == "loss"
    assert (found.expected, found.limit) == pytest.approx((center, center + CONFIG.threshold * sigma))
    assert found.sigmas == pytest.approx((100 - center) / sigma)
    center, sigma = by_definition([log(norm) for _, norm in values])
    sigma = max(sigma, MIN_LOG_NORM_SIGMA)
    found = detector.find(2.0, 1e9)
    assert found is not None and found.metric == "norm"
    assert (log(found.expected), log(found.limit)) == pytest.approx((center, center + CONFIG.threshold * sigma))


def test_a_run_that_learns_is_no_spike_and_each_jump_is() -> None:
    detector = SpikeDetector(CONFIG)
    for step, (loss, norm) in enumerate(noisy(5000)):
        assert detector.find(loss, norm) is None, step
        if step % 50 == 49 and step > 150:  # after the warm-up, in which norms rise tenfold
            for metric, found in (("loss", detector.find(loss + 1, norm)), ("norm", detector.find(loss, 40 * norm))):
                assert found is not None and found.metric == metric and found.value > found.limit > found.expected
        detector.accept(loss, norm)


def test_nothing_is_found_before_enough_is_known() -> None:
    values = noisy(CONFIG.steps_to_learn)
    assert taught(values[:-1]).find(1e9, 1e9) is None
    assert taught(values).find(1e9, 1e9) is not None


def test_what_falls_repeats_itself_or_is_zero_is_no_spike() -> None:
    same = taught([(2.0, 0.0)] * 100)
    assert same.find(2.0, 0.0) is None
    assert same.find(0.0, 0.0) is None
    assert same.find(2.02, 0.0) is None, "one percent of a loss without noise"
    assert same.find(2.2, 0.0) is not None


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_what_is_not_finite_is_beyond_any_statistics(bad: float) -> None:
    detector = taught(noisy(100))
    for found in (detector.find(bad, 1.0), detector.find(2.0, bad)):
        assert found is not None and found.sigmas == inf


def test_what_it_knows_survives_text_to_the_last_bit() -> None:
    values = noisy(200)
    for known in (20, 40, 70, 150):
        detector, restored = taught(values[:known]), taught(values[50:90])
        restored.restore(json.loads(json.dumps(detector.dump())))
        for loss, norm in values[known:]:
            assert restored.find(loss + 9, norm) == detector.find(loss + 9, norm)
            detector.accept(loss, norm)
            restored.accept(loss, norm)


def guard_after(steps: int, policy: str, **changes: Any) -> StepGuard:
    guard = StepGuard(SpikeConfig.model_validate({"policy": policy, "window": 64} | changes))
    for step, (loss, norm) in enumerate(noisy(steps), start=1):
        assert guard.judge(loss, norm, step).applied
    return guard


@pytest.mark.parametrize(
    ("policy", "spiked", "broken"),
    [
        ("off", ("apply", ""), ("skip", "not finite")),
        ("warn", ("apply", "spike"), ("skip", "not finite")),
        ("skip", ("skip", "spike"), ("skip", "not finite")),
        ("rewind", ("rewind", "spike"), ("rewind", "not finite")),
    ],
)
def test_the_policy_decides(policy: str, spiked: tuple[str, str], broken: tuple[str, str]) -> None:
    guard = guard_after(100, policy)
    for value, expected in ((50.0, spiked), (nan, broken), (50.0, spiked)):
        verdict = guard.judge(value, 1.0, 101)
        assert (verdict.action, verdict.reason) == expected
        assert (verdict.spike is not None) == (policy != "off")
    assert guard_after(10, policy).judge(nan, 1.0, 11).action == "skip", "nothing is known yet to rewind by"


@pytest.mark.parametrize("policy", ["warn", "skip", "rewind"])
def test_spikes_do_not_become_part_of_the_statistics(policy: str) -> None:
    guard = guard_after(100, policy)
    first = guard.judge(50.0, 90.0, 101).spike
    for _ in range(MAX_SKIPPED_STEPS - 2):
        guard.judge(50.0, 90.0, 101)
    assert first is not None and guard.judge(50.0, 90.0, 101).spike == first


def test_many_in_a_row_are_another_level_or_the_end() -> None:
    warned = guard_after(100, "warn")
    for step in range(101, 101 + MAX_SKIPPED_STEPS):
        assert warned.judge(50.0, 1.0, step).reason == "spike"
        warned.raise_if_diverged(50.0, 1.0, step)
    assert warned.judge(50.0, 1.0, 200).reason == "", "it learns anew"
    skipping = guard_after(100, "skip")
    for step in range(101, 101 + MAX_SKIPPED_STEPS):
        skipping.raise_if_diverged(50.0, 1.0, step)
        skipping.judge(50.0, 1.0, step)
    with pytest.raises(DivergedError, match=rf"{MAX_SKIPPED_STEPS} steps in a row up to step 110 .*`spikes.threshold`"):
        skipping.raise_if_diverged(50.0, 1.0, 110)


def test_rewinds_are_counted_until_the_run_gets_past_the_furthest_spike() -> None:
    guard = guard_after(100, "rewind")
    for number in range(1, MAX_REWINDS + 1):
        guard.rewinds = guard.count_rewind(120 - number)
        assert guard.rewinds == RewindCount(number, 119)
        guard.judge(2.0, 1.0, 119)
        assert guard.rewinds.count == number
    with pytest.raises(DivergedError, match=r"after 3 rewinds in a row, none of which got past step 119"):
        guard.count_rewind(117)
    guard.judge(2.0, 1.0, 120)
    assert guard.count_rewind(121) == RewindCount(1, 121)
    assert guard_after(40, "rewind", max_rewinds=7).config.max_rewinds == 7


def test_a_checkpoint_without_statistics_is_learned_anew() -> None:
    guard = guard_after(100, "skip")
    guard.restore({"step": 5, "cursor": 40})
    assert guard.judge(50.0, 1.0, 6).applied
    off = StepGuard(SpikeConfig(policy="off"))
    off.restore(guard_after(100, "skip").scalars())
    assert off.scalars() == {} and off.judge(50.0, 1.0, 6).applied


@pytest.mark.parametrize("threshold", [346.0, 1000.0])
def test_the_largest_thresholds_have_a_limit_that_an_event_can_tell(threshold: float) -> None:
    wild = [(2.0, exp(3 * (-1) ** step)) for step in range(200)]
    found = taught(wild, CONFIG.model_copy(update={"threshold": threshold})).find(2.0, inf)
    assert found is not None and found.metric == "norm" and found.limit <= 1e30
