"""Write how far predictions are from the published runs that nothing was fitted on, for the planner's own error bands.

    python benchmarks/validation/residuals.py           # writes the two tables in src/danlu/planner
    python benchmarks/validation/residuals.py --check   # exits with 1 if they are not what the code predicts now

Run it after every change of the cost model: `danlu plan` reads the tables.
"""

import argparse
import csv
import io
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from math import log
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from danlu.cost import count_parameters
from danlu.planner.fit_chance import default_reserve
from danlu.planner.residuals import (
    MEMORY_COLUMNS,
    MEMORY_RESIDUALS,
    STEP_COLUMNS,
    STEP_RESIDUALS,
    memory_residuals,
)
from danlu.planner.ties import TIE_WIDTH
from validation.published_runs import DATA_DIR, load_held_out, load_runs
from validation.scores import RunComparison

CLOSE = 0.1
"""Layouts whose predicted times are less than this apart are compared: a choice between them is hard."""


def step_table(points: Iterable[RunComparison]) -> str:
    """A row for every run with a measured step time."""
    engines = _engines()
    rows = [(*_question(point), engines[point.run.id], point.run.dtype, f"{point.error:.4f}") for point in points]
    return _text(STEP_COLUMNS, rows)


def memory_table(points: Iterable[RunComparison]) -> str:
    """A row for every run with a measured peak of memory; bytes."""
    rows = [
        (*_question(point), point.run.memory_kind, f"{point.predicted_memory:.0f}", f"{point.run.memory:.0f}")
        for point in points
        if point.run.memory
    ]
    return _text(MEMORY_COLUMNS, rows)


def error_between_layouts(points: Iterable[RunComparison]) -> float:
    """The median difference of the errors of two layouts of one group whose predicted times are close.

    A group is the same model, chips and batch, so that most of the error is common to its layouts.
    """
    groups: dict[str, list[RunComparison]] = defaultdict(list)
    for point in points:
        groups[point.run.group].append(point)
    return median(
        abs(log((1 + one.error) / (1 + other.error)))
        for group in groups.values()
        for one, other in combinations(group, 2)
        if one.run.layout != other.run.layout and abs(log(one.prediction.seconds / other.prediction.seconds)) < CLOSE
    )


def judged_points() -> tuple[list[RunComparison], list[RunComparison]]:
    """Runs with a measured step time that nothing was fitted on: development sets, and the held-out ones."""
    known, unseen = (
        [RunComparison(run, run.predict()) for run in runs if not run.is_fit_set and run.seconds]
        for runs in (load_runs(), load_held_out())
    )
    return known, unseen


def _question(point: RunComparison) -> tuple[object, ...]:
    run = point.run
    chip, parameters = run.cluster.chip.name, f"{count_parameters(run.model):.4g}"
    return run.set, chip, int(run.model.moe is not None), run.layout.world, parameters


def _engines() -> dict[str, str]:
    engines = {}
    for name in ("runs.csv", "held_out.csv"):
        with (DATA_DIR / name).open(encoding="utf-8", newline="") as file:
            engines.update((row["id"], row["engine"]) for row in csv.DictReader(file))
    return engines


def _text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    written = io.StringIO(newline="")
    csv.writer(written, lineterminator="\n").writerows([columns, *rows])
    return written.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args(arguments)
    points, unseen = judged_points()
    # Memory of the held-out runs is what the device showed, with all that the allocator had cached: no residual.
    tables = {STEP_RESIDUALS: step_table([*points, *unseen]), MEMORY_RESIDUALS: memory_table(points)}
    if options.check:
        stale = [path.name for path, text in tables.items() if path.read_text(encoding="utf-8") != text]
        print(f"not what the code predicts now: {', '.join(stale)}: run this again" if stale else "both are current")
        return 1 if stale else 0
    for path, text in tables.items():
        path.write_text(text, encoding="utf-8")
        print(f"{path.name}: {text.count(chr(10)) - 1} rows")
    memory_residuals.cache_clear()
    default_reserve.cache_clear()
    print(f"memory that a plan keeps free: {default_reserve():.1%} of a chip")
    print(f"error between two layouts of one group: {error_between_layouts(points):.1%}; a tie is {TIE_WIDTH:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
