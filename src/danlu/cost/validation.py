"""Predictions held against published runs: how far off, in which order, and what would have been picked.

A set is scored by its mean absolute error; a group (the same model, chips and batch, so that only the layout differs)
by rank correlation and by regret: how much slower the layout is that the prediction likes best, measured, than the
fastest one measured.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from danlu.cost.calibration import Calibration
from danlu.cost.runs import Run, runs
from danlu.cost.step import Prediction

SMALLEST_GROUP = 8
"""Runs from which a group's order is judged."""
DENSE = ("vtrain", "bloom", "megascale", "table5", "mtnlg", "bridge-h100")
MOE = ("folding", "bridge-moe")
OTHER_CHIPS = ("ascend", "amd", "maxtext")
BORDER = ("bloom", "folding")
"""Sets that tell where memory ran out."""


@dataclass(frozen=True)
class Point:
    """One run and what was predicted for it."""

    run: Run
    prediction: Prediction

    @property
    def error(self) -> float:
        """Predicted over measured time, less one."""
        return self.prediction.seconds / self.run.seconds - 1 if self.run.seconds else 0.0

    @property
    def memory(self) -> float:
        """Predicted bytes of the kind that was measured."""
        memory = self.prediction.memory
        return {"allocated": memory.allocated, "reserved": memory.reserved}.get(self.run.memory_kind, memory.device)

    @property
    def fits(self) -> bool:
        """Whether the prediction says that memory suffices."""
        return self.prediction.fits(self.run.cluster.chip.memory)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ only in their layout."""

    name: str
    rows: int
    spearman: float
    regret: float


@dataclass(frozen=True, kw_only=True)
class Score:
    """One set of runs."""

    name: str
    rows: int
    """With a measured time."""
    error: float
    """Mean absolute error of the time."""
    bias: float
    memory_rows: int
    memory_error: float
    out_of_memory: int
    """Runs that did not fit."""
    false_fits: int
    """Of these, said to fit."""
    false_refusals: int
    """Runs that did fit and were said not to."""
    groups: tuple[Group, ...]

    @property
    def fit(self) -> bool:
        """Whether constants were fitted on it."""
        return self.name.startswith("fit-")


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A figure to reach."""

    name: str
    value: float
    limit: float
    least: bool = False
    """The value must be at least the limit, not at most."""
    unit: str = "%"

    @property
    def passed(self) -> bool:
        """Whether it is reached."""
        return self.value >= self.limit if self.least else self.value <= self.limit


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Everything that the published runs say about the predictions."""

    points: tuple[Point, ...]
    scores: tuple[Score, ...]
    bars: tuple[Bar, ...]

    @property
    def passed(self) -> bool:
        """Whether every bar is reached."""
        return all(bar.passed for bar in self.bars)


def validate(constants: Calibration | None = None) -> Validation:
    """Predict every published run and score the predictions."""
    points = tuple(Point(run, run.predict(constants)) for run in runs())
    by_set: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        by_set[point.run.set].append(point)
    scores = tuple(_score(name, some) for name, some in sorted(by_set.items(), key=_fit_first))
    return Validation(points=points, scores=scores, bars=tuple(_bars(by_set, scores)))


def _fit_first(item: tuple[str, list[Point]]) -> tuple[bool, str]:
    return not item[0].startswith("fit-"), item[0]


def _score(name: str, points: Sequence[Point]) -> Score:
    timed = [point for point in points if point.run.seconds]
    errors = np.array([point.error for point in timed])
    weighed = [point.memory / point.run.memory - 1 for point in points if point.run.memory]
    lost = [point for point in points if point.run.out_of_memory]
    return Score(
        name=name,
        rows=len(timed),
        error=float(np.abs(errors).mean()),
        bias=float(errors.mean()),
        memory_rows=len(weighed),
        memory_error=float(np.abs(weighed).mean()) if weighed else 0.0,
        out_of_memory=len(lost),
        false_fits=sum(point.fits for point in lost),
        false_refusals=sum(not point.fits for point in timed),
        groups=tuple(_groups(timed)),
    )


def _groups(points: Iterable[Point]) -> list[Group]:
    groups: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        groups[point.run.group].append(point)
    return [
        Group(name=name, rows=len(some), spearman=_spearman(some), regret=_regret(some))
        for name, some in sorted(groups.items())
        if len(some) >= SMALLEST_GROUP and len({point.run.layout for point in some}) > 1
    ]


def _spearman(points: Sequence[Point]) -> float:
    """Correlation of the ranks of predicted and measured times."""
    predicted = _ranks([point.prediction.seconds for point in points])
    measured = _ranks([point.run.seconds or 0.0 for point in points])
    return float(np.corrcoef(predicted, measured)[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks from 0, equal values sharing the mean of theirs."""
    ordered = sorted(values)
    places = defaultdict(list)
    for place, value in enumerate(ordered):
        places[value].append(place)
    return np.array([np.mean(places[value]) for value in values])


def _regret(points: Sequence[Point]) -> float:
    """How much slower the predicted best was, measured, than the measured best.

    Runs of one layout were measured several times; the pick is judged by the mean of its measurements.
    """
    times: dict[object, list[float]] = defaultdict(list)
    predicted: dict[object, float] = {}
    for point in points:
        key = (point.run.layout, point.run.software, point.run.dtype)
        times[key].append(point.run.seconds or 0.0)
        predicted[key] = point.prediction.seconds
    means = {key: sum(some) / len(some) for key, some in times.items()}
    pick = min(predicted, key=lambda key: predicted[key])
    return means[pick] / min(means.values()) - 1


def _bars(by_set: dict[str, list[Point]], scores: Sequence[Score]) -> list[Bar]:
    of = {score.name: score for score in scores}

    def error(sets: Iterable[str]) -> float:
        errors = [abs(point.error) for name in sets for point in by_set[name] if point.run.seconds]
        return 100 * float(np.mean(errors))

    groups = [group for score in scores if not score.fit for group in score.groups]
    weighed = [score for score in scores if score.memory_rows and not score.fit]
    rows = sum(score.memory_rows for score in weighed)
    memory = 100 * sum(score.memory_error * score.memory_rows for score in weighed) / rows
    return [
        Bar(name="dense, held out", value=error(DENSE), limit=10),
        Bar(name="vtrain", value=error(["vtrain"]), limit=12),
        Bar(name="bloom", value=error(["bloom"]), limit=12),
        Bar(name="mixture of experts, held out", value=error(MOE), limit=15),
        Bar(name="other chips", value=error(OTHER_CHIPS), limit=15),
        Bar(
            name="rank correlation, lowest",
            value=min(group.spearman for group in groups),
            limit=0.9,
            least=True,
            unit="",
        ),
        Bar(name="regret, largest", value=100 * max(group.regret for group in groups), limit=3),
        Bar(name="memory, held out", value=memory, limit=5),
        Bar(name="said to fit, did not", value=sum(of[name].false_fits for name in BORDER), limit=0, unit=""),
        Bar(name="said not to fit, did", value=sum(of[name].false_refusals for name in BORDER), limit=2, unit=""),
    ]
