"""The error of a predicted step time, from the published runs that are most like the request.

A prediction is one number; runs of the same kind, predicted the same way, were measured below and above theirs. The
band holds eight of ten of the nearest: with or without experts as in the request, of the same chip if there are enough
of those, nearest in the logarithm of chips and parameters.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, log2

from danlu.cost import count_parameters
from danlu.planner.request import PlanRequest
from danlu.planner.residuals import StepResidual, percentile, step_residuals

BAND_PERCENTILES = (10, 90)
"""Of measured over predicted: eight of ten runs are between them."""
MIN_RUNS = 12
"""Fewer runs give no band."""
NEAREST_RUNS = 24
"""Runs that a band is of, if as many are near; more only if they are as near as the last of these."""
NEAR = 3.0
"""Largest distance of a run that is near, in doublings: a factor of 8 in chips or in parameters, or of 4.3 in both."""


@dataclass(frozen=True, kw_only=True)
class ErrorBand:
    """Measured over predicted step time, of eight of ten runs like the request."""

    low: float
    high: float
    runs: int
    """Published runs that the band is of."""
    source: str
    """Which runs these are."""
    is_near: bool
    """Whether they are like the request; if not, they are all published runs."""

    def seconds(self, predicted: float) -> tuple[float, float]:
        """The band of a predicted time."""
        return self.low * predicted, self.high * predicted


def error_band(request: PlanRequest) -> ErrorBand:
    """The band of a request, which is the same for all its layouts."""
    return band_of_runs(
        step_residuals(),
        chip=request.cluster.chip.name,
        moe=request.model.moe is not None,
        fp32=request.dtype == "fp32",
        chips=request.chips,
        parameters=count_parameters(request.model),
    )


def band_of_runs(
    rows: Sequence[StepResidual], *, chip: str, moe: bool, chips: int, parameters: float, fp32: bool = False
) -> ErrorBand:
    """The band of the runs nearest to this many chips and parameters; a run in fp32 is like no other."""

    def distance(row: StepResidual) -> float:
        return hypot(log2(row.chips / chips), log2(row.parameters / parameters))

    known = chip_model(chip, {row.chip for row in rows})
    alike = (row for row in rows if row.moe == moe and (row.dtype == "fp32") == fp32)
    near = sorted((row for row in alike if distance(row) <= NEAR), key=distance)
    same = [row for row in near if known and _model_name(row.chip) == known]
    for some, name in ((same, known), (near, "any chip")):
        if len(some) >= MIN_RUNS:
            farthest = distance(some[min(len(some), NEAREST_RUNS) - 1])
            chosen = [row for row in some if distance(row) <= farthest]
            return _band(chosen, f"{len(chosen)} published runs {_kind(moe)} on {name}, {_span(chosen)}", is_near=True)
    return _band(rows, f"no published run is near this; the band is that of all {len(rows)}", is_near=False)


def chip_model(chip: str, known: set[str]) -> str:
    """The model of a chip among those of published runs: `H100` of `H100-SXM-80GB`; empty if none has it."""
    found = [name for name in map(_model_name, known) if name.lower() in chip.lower()]
    return max(found, key=len, default="")


def _model_name(chip: str) -> str:
    """The first word of a chip's name that has a digit: `H100` of `H100-96GB-500W`, `910B` of `Ascend-910B`."""
    return next((word for word in re.split(r"[-\s]", chip) if re.search(r"\d", word)), chip)


def _kind(moe: bool) -> str:
    return "with experts" if moe else "without experts"


def _span(rows: Sequence[StepResidual]) -> str:
    least, most = min(row.chips for row in rows), max(row.chips for row in rows)
    return f"{least:,} to {most:,} chips" if least < most else f"{least:,} chips"


def _band(rows: Sequence[StepResidual], source: str, *, is_near: bool) -> ErrorBand:
    ratios = [row.ratio for row in rows]
    low, high = (percentile(ratios, percent) for percent in BAND_PERCENTILES)
    return ErrorBand(low=low, high=high, runs=len(ratios), source=source, is_near=is_near)
