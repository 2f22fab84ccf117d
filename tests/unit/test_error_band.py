"""The error of a prediction comes from the published runs that are most like the question, and says which they are."""

from dataclasses import replace

import pytest
from made_questions import DENSE, machine, question

from danlu.planner.error_band import MIN_RUNS, NEAREST_RUNS, band_of_runs, chip_model, error_band
from danlu.planner.residuals import StepResidual, percentile, step_residuals
from danlu.report.plan_confidence import band_json, band_text, step_with_band
from danlu.spec.recipe import PrecisionConfig

RUN = StepResidual(
    set="one", chip="H100-80GB", moe=False, chips=64, parameters=1e10, engine="fsdp", dtype="bf16", error=0.0
)
ASKED = {"chip": "H100-SXM-80GB", "moe": False, "chips": 64, "parameters": 1e10}


def _runs(number: int, **changes: object) -> list[StepResidual]:
    """Runs whose errors go in even steps from a tenth too fast to a tenth too slow."""
    return [replace(RUN, error=0.2 * index / (number - 1) - 0.1, **changes) for index in range(number)]


def test_eight_of_ten_runs_are_inside_and_one_is_on_either_side() -> None:
    band = band_of_runs(_runs(101), **ASKED)
    assert band.runs == 101  # all as near as the nearest
    inside = [row for row in _runs(101) if band.low <= row.ratio <= band.high]
    assert len(inside) == 81
    assert band.low == pytest.approx(1 / 1.08) and band.high == pytest.approx(1 / 0.92)
    assert band.seconds(10.0) == (pytest.approx(10 / 1.08), pytest.approx(10 / 0.92))


def test_a_run_measured_slower_than_predicted_widens_the_band_upwards() -> None:
    """The error is predicted over measured; the band is of what would be measured."""
    band = band_of_runs([replace(row, error=-0.5) for row in _runs(20)], **ASKED)
    assert (band.low, band.high) == (2.0, 2.0)


def test_the_same_chip_comes_first_and_any_chip_if_it_has_too_few() -> None:
    same, others = _runs(MIN_RUNS), [replace(row, error=1.0) for row in _runs(40, chip="A100-80GB")]
    band = band_of_runs([*others, *same], **ASKED)
    assert (band.runs, band.is_near) == (MIN_RUNS, True)
    assert "on H100, 64 chips" in band.source
    fewer = band_of_runs([*others, *same[1:]], **ASKED)
    assert fewer.runs == 40 + MIN_RUNS - 1
    assert "on any chip" in fewer.source and fewer.is_near
    assert fewer.low == 0.5


def test_the_nearest_in_chips_and_parameters_are_taken() -> None:
    near, far = _runs(NEAREST_RUNS, chips=128), [replace(row, error=1.0) for row in _runs(200, chips=256)]
    band = band_of_runs([*far, *near], **ASKED)
    assert (band.runs, band.low > 0.9) == (NEAREST_RUNS, True)
    bigger = [replace(row, chips=64, parameters=4e10) for row in far]
    assert band_of_runs([*bigger, *near], **ASKED).runs == NEAREST_RUNS


@pytest.mark.parametrize(
    "other", [{"chips": 64 * 16}, {"parameters": 1e10 / 16}, {"chips": 64 * 8, "parameters": 8e10}, {"moe": True}]
)
def test_where_no_run_is_near_the_band_is_that_of_all_and_says_so(other: dict[str, object]) -> None:
    band = band_of_runs(_runs(50, **other), **ASKED)
    assert not band.is_near
    assert band.source == "no published run is near this; the band is that of all 50"
    assert band.runs == 50


def test_a_chip_is_known_by_the_longest_model_in_its_name() -> None:
    known = {row.chip for row in step_residuals()}
    assert chip_model("H100-SXM-80GB", known) == chip_model("NVIDIA H100 80GB HBM3", known) == "H100"
    assert chip_model("NVIDIA GB200", known) == "GB200"
    assert chip_model("Ascend 910B3", known) == "910B"
    assert chip_model("cpu", known) == ""


def test_runs_in_half_precision_say_nothing_of_fp32() -> None:
    asked = question(chips=16, cluster=machine(nodes=4))
    single = asked.recipe.model_copy(update={"precision": PrecisionConfig(compute="fp32")})
    assert error_band(asked).is_near
    assert not error_band(replace(asked, recipe=single)).is_near


def test_the_shipped_runs_are_many_and_nothing_was_fitted_on_them() -> None:
    rows = step_residuals()
    assert len(rows) > 700
    assert not any(row.set.startswith("fit-") for row in rows)
    assert {row.moe for row in rows} == {True, False}
    assert all(-0.9 < row.error < 9 and row.chips >= 1 and row.parameters > 1e6 for row in rows)


def test_a_step_is_told_with_its_band_and_which_runs_it_is_of() -> None:
    from danlu.planner import search

    best = search(question(DENSE, chips=8, cluster=machine(nodes=2), without="pp"), shown=1).best[0]
    band = error_band(best.request)
    low, high = band.seconds(best.seconds)
    told = step_with_band(best)
    assert f"{best.seconds * 1e3:.1f} ms (" in told and "ms for 8 of 10 runs like it)" in told
    words = told.partition("(")[2].split()
    assert float(words[0]) == pytest.approx(1e3 * low, rel=0.01) and float(words[2]) == pytest.approx(
        1e3 * high, rel=0.01
    )
    assert band.source in band_text(best)
    answer = band_json(best)
    assert (answer["low"], answer["high"], answer["runs"]) == (low, high, band.runs)


def test_a_percentile_lies_between_the_two_values_around_it() -> None:
    assert percentile([4.0, 1.0, 2.0, 3.0, 5.0], 50) == 3.0
    assert percentile(range(1, 12), 90) == 10.0
