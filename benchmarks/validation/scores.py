"""Compares predictions with published runs: error, order of layouts, and regret of the predicted best.

A set is scored by its mean absolute error; a group (the same model, chips and batch, so that only the layout differs)
by rank correlation, by how many pairs of runs that were measured more than a tenth apart are ordered right, and by
regret: how much slower the layout predicted to be fastest was measured than the fastest.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from danlu.cost.calibration import Calibration
from danlu.cost.step_prediction import StepPrediction
from danlu.planner.fit_chance import default_reserve
from validation.held_out import first_predictions
from validation.published_runs import PublishedRun, TableVersion, load_held_out, load_one_node, load_runs

MIN_JUDGED_GROUP = 8
"""Smallest group whose order is scored."""
MIN_SHOWN_GROUP = 3
"""Smallest group whose regret is shown."""
DENSE = ("vtrain", "bloom", "megascale", "table5", "mtnlg", "bridge-h100")
MOE = ("folding", "bridge-moe")
OTHER_CHIPS = ("ascend", "amd", "maxtext")
OOM_SETS = ("bloom", "folding")
"""Sets that report out-of-memory runs."""
CONTRADICTED = {"0590"}
"""Out-of-memory runs that their own source contradicts, with the reason in docs/planner-truth.md; not scored."""
APART = 1.1
"""Ratio of two measured times above which their order is a fact, not noise."""


@dataclass(frozen=True)
class RunComparison:
    """One run and its prediction."""

    run: PublishedRun
    prediction: StepPrediction

    @property
    def error(self) -> float:
        """Predicted over measured time, less one."""
        return self.prediction.seconds / self.run.seconds - 1 if self.run.seconds else 0.0

    @property
    def predicted_memory(self) -> float:
        """Predicted bytes of the kind that was measured."""
        memory = self.prediction.memory
        return {"allocated": memory.allocated, "reserved": memory.reserved}.get(
            self.run.memory_kind, memory.device_bytes
        )

    @property
    def fits(self) -> bool:
        """Whether it is predicted to fit."""
        return self.prediction.fits(self.run.cluster.chip.memory)


@dataclass(frozen=True, kw_only=True)
class LayoutComparison:
    """Runs that differ only in their layout."""

    name: str
    rows: int
    spearman: float
    regret: float
    pairs: int
    """Of runs whose measured times differ by more than `APART`."""
    ordered: int
    """Of these, ordered right."""


@dataclass(frozen=True, kw_only=True)
class SetScore:
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
    """Of these, predicted to fit."""
    false_rejections: int
    """Runs that did fit and were predicted not to."""
    groups: tuple[LayoutComparison, ...]
    small_groups: tuple[LayoutComparison, ...]
    """Groups too small to be scored; their regret is shown."""

    @property
    def is_fit_set(self) -> bool:
        """Whether constants were fitted on it."""
        return self.name.startswith("fit-")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A figure and its target."""

    name: str
    value: float
    limit: float
    at_least: bool = False
    """The value must be at least the limit, not at most."""
    unit: str = "%"

    @property
    def passed(self) -> bool:
        """Whether it is reached."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass(frozen=True, kw_only=True)
class ValidationReport:
    """All scores of the predictions against the published runs."""

    points: tuple[RunComparison, ...]
    scores: tuple[SetScore, ...]
    bars: tuple[Target, ...]
    first_values: tuple[Target, ...] = ()
    """The same targets on held-out runs with their first committed values."""
    first_columns: tuple[Target, ...] = ()
    """The same, with all columns that were added since left empty."""
    held_out: tuple[SetScore, ...] = ()
    """Sets that nothing was fitted on or chosen by, as predicted now; the targets take the first prediction."""

    @property
    def passed(self) -> bool:
        """Whether every target is reached."""
        return all(bar.passed for bar in self.bars)


def validate(constants: Calibration | None = None) -> ValidationReport:
    """Predict every published run and score the predictions."""
    now = _validate_version("now", constants)
    first_values, first_columns = (
        _validate_version(each, constants).bars for each in ("first values", "first columns")
    )
    unseen = (*_one_node_bars(constants), *_held_out_bars())
    return replace(
        now,
        bars=(*now.bars, *unseen),
        first_values=(*first_values, *unseen),
        first_columns=(*first_columns, *unseen),
        held_out=_held_out_scores(constants),
    )


def _validate_version(described: TableVersion, constants: Calibration | None) -> ValidationReport:
    points = tuple(RunComparison(run, run.predict(constants)) for run in load_runs(described))
    by_set: dict[str, list[RunComparison]] = defaultdict(list)
    for point in points:
        by_set[point.run.set].append(point)
    scores = tuple(_score(name, some) for name, some in sorted(by_set.items(), key=_fit_first))
    return ValidationReport(points=points, scores=scores, bars=tuple(_bars(by_set, scores)))


def _fit_first(item: tuple[str, list[RunComparison]]) -> tuple[bool, str]:
    return not item[0].startswith("fit-"), item[0]


def _score(name: str, points: Sequence[RunComparison]) -> SetScore:
    timed = [point for point in points if point.run.seconds]
    errors = np.array([point.error for point in timed])
    weighed = [point.predicted_memory / point.run.memory - 1 for point in points if point.run.memory]
    lost = [point for point in points if point.run.out_of_memory and point.run.id not in CONTRADICTED]
    found = _groups(timed)
    return SetScore(
        name=name,
        rows=len(timed),
        error=float(np.abs(errors).mean()),
        bias=float(errors.mean()),
        memory_rows=len(weighed),
        memory_error=float(np.abs(weighed).mean()) if weighed else 0.0,
        out_of_memory=len(lost),
        false_fits=sum(point.fits for point in lost),
        false_rejections=sum(not point.fits for point in timed),
        groups=tuple(group for group in found if group.rows >= MIN_JUDGED_GROUP),
        small_groups=tuple(group for group in found if group.rows < MIN_JUDGED_GROUP),
    )


def _groups(points: Iterable[RunComparison]) -> list[LayoutComparison]:
    groups: dict[str, list[RunComparison]] = defaultdict(list)
    for point in points:
        groups[point.run.group].append(point)
    return [
        LayoutComparison(
            name=name, rows=len(some), spearman=_spearman(some), regret=_regret(some), **_ordered_pairs(some)
        )
        for name, some in sorted(groups.items())
        if len(some) >= MIN_SHOWN_GROUP and len({point.run.layout for point in some}) > 1
    ]


def _spearman(points: Sequence[RunComparison]) -> float:
    """Correlation of the ranks of predicted and measured times."""
    predicted = _ranks([point.prediction.seconds for point in points])
    measured = _ranks([point.run.seconds or 0.0 for point in points])
    return float(np.corrcoef(predicted, measured)[0, 1])


def _ordered_pairs(points: Sequence[RunComparison]) -> dict[str, int]:
    """Pairs of runs that were measured more than a tenth apart, and how many of them are predicted in that order."""
    pairs = ordered = 0
    for one, other in combinations(points, 2):
        slow, fast = sorted((one, other), key=lambda point: -(point.run.seconds or 0.0))
        if (slow.run.seconds or 0.0) > APART * (fast.run.seconds or 0.0):
            pairs += 1
            ordered += slow.prediction.seconds > fast.prediction.seconds
    return {"pairs": pairs, "ordered": ordered}


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks from 0; equal values share their mean rank."""
    ordered = sorted(values)
    positions = defaultdict(list)
    for position, value in enumerate(ordered):
        positions[value].append(position)
    return np.array([np.mean(positions[value]) for value in values])


def _regret(points: Sequence[RunComparison]) -> float:
    """How much slower the predicted best was, measured, than the measured best.

    Runs of one layout were measured several times; the pick is scored by the mean of its measurements.
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


def _bars(by_set: dict[str, list[RunComparison]], scores: Sequence[SetScore]) -> list[Target]:
    of = {score.name: score for score in scores}

    def error(sets: Iterable[str]) -> float:
        errors = [abs(point.error) for name in sets for point in by_set[name] if point.run.seconds]
        return 100 * float(np.mean(errors))

    groups = [group for score in scores if not score.is_fit_set for group in score.groups]
    pairs = sum(group.pairs for group in groups)
    weighed = [score for score in scores if score.memory_rows and not score.is_fit_set]
    memory = sum(score.memory_error * score.memory_rows for score in weighed)
    return [
        Target(name="FSDP on clusters", value=error(["fsdp-clusters"]), limit=3.5),
        Target(name="dense", value=error(DENSE), limit=7.5),
        Target(name="mixture of experts", value=error(MOE), limit=13),
        Target(name="other chips", value=error(OTHER_CHIPS), limit=13),
        Target(name="Llama 3, Table 4", value=error(["llama3"]), limit=6),
        Target(
            name="pairs a tenth apart, ordered right",
            value=100 * sum(group.ordered for group in groups) / pairs,
            limit=90,
            at_least=True,
        ),
        Target(
            name="rank correlation, median",
            value=float(np.median([group.spearman for group in groups])),
            limit=0.85,
            at_least=True,
            unit="",
        ),
        Target(name="regret, mean", value=100 * float(np.mean([group.regret for group in groups])), limit=1),
        Target(name="memory", value=100 * memory / sum(score.memory_rows for score in weighed), limit=5),
        Target(name="memory beyond the default reserve", value=100 * _overrun(by_set), limit=5),
        Target(name="said to fit, did not", value=sum(of[name].false_fits for name in OOM_SETS), limit=0, unit=""),
        Target(
            name="said not to fit, did", value=sum(of[name].false_rejections for name in OOM_SETS), limit=2, unit=""
        ),
    ]


def _overrun(by_set: dict[str, list[RunComparison]]) -> float:
    """Share of runs that took more memory than predicted and the default reserve together."""
    taken = [
        point.run.memory / point.predicted_memory
        for name, points in by_set.items()
        if not name.startswith("fit-")
        for point in points
        if point.run.memory
    ]
    return sum(not ratio * (1 - default_reserve()) <= 1 + 1e-9 for ratio in taken) / len(taken)  # NaN overruns too


def _one_node_bars(constants: Calibration | None) -> tuple[Target, ...]:
    """The order of all 1,440 layouts of one node; constants are fitted on the step times of every twelfth."""
    points = [RunComparison(run, run.predict(constants)) for run in load_one_node()]
    groups = [group for group in _groups(points) if group.rows >= MIN_JUDGED_GROUP]
    regret = 100 * float(np.mean([group.regret for group in groups]))
    return (Target(name=f"regret on one node, mean of {len(groups)} groups", value=regret, limit=4),)


def _held_out_bars() -> tuple[Target, ...]:
    """Errors of the first prediction of every held-out set."""
    errors: dict[str, list[float]] = defaultdict(list)
    first = first_predictions()
    for run in load_held_out():
        if run.seconds:
            errors[run.set].append(abs(first[run.id] / run.seconds - 1))
    limits = {"new-dense": ("held out: dense", 10.0), "new-moe": ("held out: mixture of experts", 17.0)}
    return tuple(
        Target(name=name, value=100 * float(np.mean(errors[each])), limit=limit)
        for each, (name, limit) in limits.items()
    )


def _held_out_scores(constants: Calibration | None) -> tuple[SetScore, ...]:
    by_set: dict[str, list[RunComparison]] = defaultdict(list)
    for run in load_held_out():
        by_set[run.set].append(RunComparison(run, run.predict(constants)))
    return tuple(_score(name, some) for name, some in sorted(by_set.items()))
