"""How far predictions were from published runs: two small tables beside this file.

`python benchmarks/validation/residuals.py` writes them from the published runs that nothing was fitted on. They are
data: a cost model that changes gets new tables, and every error that the planner prints follows.
"""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import quantiles

STEP_RESIDUALS = Path(__file__).parent / "residuals.csv"
MEMORY_RESIDUALS = Path(__file__).parent / "memory_residuals.csv"


@dataclass(frozen=True, kw_only=True)
class StepResidual:
    """The step time of one published run: `error` is predicted over measured, less one."""

    set: str
    chip: str
    moe: bool
    chips: int
    parameters: float
    engine: str
    dtype: str
    error: float

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return 1 / (1 + self.error)


@dataclass(frozen=True, kw_only=True)
class MemoryResidual:
    """The memory of one published run, in bytes of the kind that was measured."""

    set: str
    chip: str
    moe: bool
    chips: int
    parameters: float
    kind: str
    """`allocated`, `reserved` or `device`."""
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted


STEP_COLUMNS = ("set", "chip", "moe", "chips", "parameters", "engine", "dtype", "error")
MEMORY_COLUMNS = ("set", "chip", "moe", "chips", "parameters", "kind", "predicted", "measured")


@cache
def step_residuals(path: Path = STEP_RESIDUALS) -> tuple[StepResidual, ...]:
    """Every published run with a measured step time."""
    return tuple(
        StepResidual(
            set=row["set"],
            chip=row["chip"],
            moe=row["moe"] == "1",
            chips=int(row["chips"]),
            parameters=float(row["parameters"]),
            engine=row["engine"],
            dtype=row["dtype"],
            error=float(row["error"]),
        )
        for row in _rows(path)
    )


@cache
def memory_residuals(path: Path = MEMORY_RESIDUALS) -> tuple[MemoryResidual, ...]:
    """Every published run with a measured peak of memory."""
    return tuple(
        MemoryResidual(
            set=row["set"],
            chip=row["chip"],
            moe=row["moe"] == "1",
            chips=int(row["chips"]),
            parameters=float(row["parameters"]),
            kind=row["kind"],
            predicted=float(row["predicted"]),
            measured=float(row["measured"]),
        )
        for row in _rows(path)
    )


def percentile(values: Iterable[float], percent: int) -> float:
    """The value that this percentage of the values do not exceed, interpolated between the two around it."""
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
