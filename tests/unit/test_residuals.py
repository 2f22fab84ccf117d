"""The planner's tables of errors are those of the cost model that it predicts with."""

import csv
import io
import sys
from pathlib import Path

import pytest

from danlu.planner.residuals import MEMORY_RESIDUALS, STEP_RESIDUALS, memory_residuals, step_residuals

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from validation.published_runs import load_held_out, load_runs
from validation.residuals import judged_points, memory_table, step_table
from validation.scores import RunComparison

Points = tuple[list[RunComparison], list[RunComparison]]
"""Of the development sets, and held out."""

AGAIN = "the cost model has changed: python benchmarks/validation/residuals.py"


@pytest.fixture(scope="module")
def points() -> Points:
    return judged_points()


def _rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_the_shipped_tables_are_what_the_code_predicts_now(points: Points) -> None:
    known, unseen = points
    for path, text in ((STEP_RESIDUALS, step_table([*known, *unseen])), (MEMORY_RESIDUALS, memory_table(known))):
        shipped, now = _rows(path.read_text(encoding="utf-8")), _rows(text)
        assert len(shipped) == len(now), AGAIN
        for one, other in zip(shipped, now, strict=True):
            for column, value in other.items():
                if column in ("error", "predicted", "measured"):  # a machine may round the last digit otherwise
                    assert float(one[column]) == pytest.approx(float(value), rel=1e-3, abs=2e-4), (one, AGAIN)
                else:
                    assert one[column] == value, AGAIN


def test_every_row_is_a_run_that_nothing_was_fitted_on_with_its_own_figures(points: Points) -> None:
    held = [run for run in load_runs() if not run.is_fit_set and run.seconds]
    unseen = [run for run in load_held_out() if run.seconds]
    weighed = [run for run in held if run.memory]
    assert (len(step_residuals()), len(memory_residuals())) == (len(held) + len(unseen), len(weighed))
    for row, point in zip(step_residuals(), [*points[0], *points[1]], strict=True):
        run = point.run
        assert (row.set, row.chip, row.moe, row.chips) == (
            run.set,
            run.cluster.chip.name,
            run.model.moe is not None,
            run.layout.world,
        )
        assert row.ratio == pytest.approx(run.seconds / point.prediction.seconds, rel=1e-3)
    for memory, run in zip(memory_residuals(), weighed, strict=True):
        assert memory.measured == pytest.approx(run.memory)
        assert memory.kind == run.memory_kind in ("allocated", "reserved", "device")
