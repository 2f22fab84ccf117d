"""Several runs beside each other: where their losses part, and which settings differ."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from danlu.report.checkpoints import format_layout
from danlu.report.run_history import RunHistory, read_run_history
from danlu.report.run_tables import RunSummary, find_run, summarize_run
from danlu.spec import EvaluationEvent, RunFolder, SpecError, load_plan, load_recipe
from danlu.spec.description import SpecModel
from danlu.spec.problem import format_key, problem_at
from danlu.spec.quantity import IN_FILE

MAX_RUNS = 8
"""Colors that can be told apart."""

Axis = Literal["step", "tokens", "hours"]
"""What curves are drawn over: steps, tokens read so far, or running time."""
Settings = dict[str, Any]
"""A description's values by dotted key."""


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One of the runs, as its folder was when it was read."""

    label: str
    """A letter: names may be long, and alike."""
    name: str
    """The run's name; the path of its folder if another one has the same name."""
    summary: RunSummary
    history: RunHistory
    recipe: Settings | None
    plan: Settings | None
    """None if the file is missing or cannot be read."""
    notes: tuple[str, ...]
    """What could not be read."""

    @property
    def layout(self) -> str:
        """The layouts of its starts, in order; one that follows itself once."""
        layouts = [format_layout(start.layout) for start in self.history.starts]
        return " → ".join(each for at, each in enumerate(layouts) if at == 0 or each != layouts[at - 1])

    def positions(self, axis: Axis) -> list[float]:
        """Where each of its steps lies on an axis; running time in seconds."""
        steps = self.history.steps
        if axis == "step":
            return [float(each.step) for each in steps]
        if axis == "tokens":
            return list(accumulate(float(each.tokens) for each in steps))
        return self.history.elapsed_seconds

    def evaluation_at(self, step: int | None) -> EvaluationEvent | None:
        """Its evaluation after a step; the newest one if no step is given."""
        if step is None:
            return self.history.evaluations[-1] if self.history.evaluated else None
        return self.history.evaluated.get(step)


@dataclass(frozen=True, kw_only=True)
class LossDifference:
    """How far the losses of a run follow those of the first one, over the steps that both have."""

    first: str
    second: str
    """Labels of the two runs."""
    common_steps: int
    equal_until: int | None
    """The last step up to which all losses have the same bits; None if the first common step differs already."""
    differs_at: int | None
    """The first step whose losses have different bits; None if there is none."""
    losses: tuple[float, float] | None
    """Both losses of that step."""
    largest: float | None
    """Largest relative difference of any step; None if no step has two finite losses."""
    largest_at: int | None


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Runs beside each other; the first one is what the others are compared with."""

    runs: tuple[ComparedRun, ...]
    last_common_step: int | None
    """The newest step that every run has taken."""
    evaluated_step: int | None
    """The newest step after which every run that evaluates has evaluated; None if there is none."""
    losses: tuple[LossDifference, ...]
    recipe: dict[str, list[Any]]
    plan: dict[str, list[Any]]
    """Keys whose values differ, each with the value of every run; None where a run does not have the key."""

    def to_json(self) -> dict[str, Any]:
        """The comparison for programs."""
        return {
            "runs": [_run_json(run, self) for run in self.runs],
            "last_common_step": self.last_common_step,
            "evaluated_step": self.evaluated_step,
            "losses": [asdict(each) for each in self.losses],
            "recipe": self.recipe,
            "plan": self.plan,
        }


def _run_json(run: ComparedRun, comparison: RunComparison) -> dict[str, Any]:
    evaluation = run.evaluation_at(comparison.evaluated_step) if comparison.evaluated_step is not None else None
    return {
        "label": run.label,
        **asdict(run.summary),
        "loss_at_last_common_step": loss_at(run, comparison.last_common_step),
        "held_out_at_evaluated_step": dict(evaluation.losses) if evaluation else None,
        "step_seconds": run.history.stats_of(run.history.start_of_last_step).step_seconds,
        "goodput": run.history.goodput,
        "layout": run.history.start.layout if run.history.start else None,
        "notes": list(run.notes),
    }


def find_runs(names: Sequence[str], folder: Path) -> list[RunFolder]:
    """The runs of these names or folders; raises `SpecError` unless they are two to eight different ones."""
    if not 2 <= len(names) <= MAX_RUNS:
        count = f"must be 2 to {MAX_RUNS}, but {len(names)} {'is' if len(names) == 1 else 'are'} given"
        raise SpecError([problem_at(folder, 1, "runs", count, "such as: danlu compare first second")])
    found = [find_run(name, folder) for name in names]
    paths = [run.path.resolve() for run in found]
    for at, path in enumerate(paths):
        if path in paths[:at]:
            raise SpecError([problem_at(found[at].path, 1, "run", "is given twice", "omit one of them")])
    return found


def compare_runs(folders: Sequence[RunFolder]) -> RunComparison:
    """Compare runs as they are now, running ones included."""
    names = [run.name for run in folders]
    runs = tuple(_read(run, "ABCDEFGH"[at], names.count(run.name) > 1) for at, run in enumerate(folders))
    taken = set.intersection(*({step.step for step in run.history.steps} for run in runs))
    evaluated = [set(run.history.evaluated) for run in runs if run.history.evaluated]
    return RunComparison(
        runs=runs,
        last_common_step=max(taken, default=None),
        evaluated_step=max(set.intersection(*evaluated), default=None) if evaluated else None,
        losses=tuple(_loss_difference(runs[0], run) for run in runs[1:]),
        recipe=_differences([run.recipe for run in runs]),
        plan=_differences([run.plan for run in runs]),
    )


def loss_at(run: ComparedRun, step: int | None) -> float | None:
    """The loss of a step; None if the run has not taken it."""
    return next((each.loss for each in run.history.steps if each.step == step), None)


def _read(run: RunFolder, label: str, is_ambiguous: bool) -> ComparedRun:
    history = read_run_history(run)
    notes = history.unread
    return ComparedRun(
        label=label,
        name=str(run.path) if is_ambiguous else run.name,
        summary=summarize_run(run, history),
        history=history,
        recipe=_settings(run.recipe, load_recipe, notes),
        plan=_settings(run.plan, load_plan, notes),
        notes=tuple(notes),
    )


def _settings(path: Path, load: Callable[[Path], SpecModel], notes: list[str]) -> Settings | None:
    """The values of a run's file with all defaults, by key; None, and a note, if it cannot be read."""
    if not path.exists():
        notes.append(f"{path} does not exist, so its keys are not compared")
        return None
    try:
        values = load(path).model_dump(mode="json", exclude_none=True, context={IN_FILE: True})
    except SpecError as error:
        notes.append(f"{str(error).splitlines()[0]}; its keys are not compared")
        return None
    return {format_key(key): value for key, value in _flatten(values, ()) if key != ("name",)}


def _flatten(value: Any, key: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flatten(inner, (*key, name))
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for index, inner in enumerate(value):
            yield from _flatten(inner, (*key, index))
    else:
        yield key, value


def _differences(settings: Sequence[Settings | None]) -> dict[str, list[Any]]:
    """Keys whose values differ among the runs whose file could be read."""
    known = [each for each in settings if each is not None]
    keys = dict.fromkeys(key for each in known for key in each)
    return {
        key: [None if each is None else each.get(key) for each in settings]
        for key in keys
        if any(each.get(key) != known[0].get(key) for each in known)
    }


def _loss_difference(first: ComparedRun, second: ComparedRun) -> LossDifference:
    ours = {step.step: step.loss for step in first.history.steps}
    pairs = [(step.step, ours[step.step], step.loss) for step in second.history.steps if step.step in ours]
    equal_until, differs_at, losses = None, None, None
    for step, one, other in pairs:
        if one.hex() != other.hex():  # by bits: two NaN are the same
            differs_at, losses = step, (one, other)
            break
        equal_until = step
    ratios = [(_relative(one, other), step) for step, one, other in pairs if isfinite(one) and isfinite(other)]
    largest, at = max(ratios, default=(None, None), key=lambda ratio: ratio[0])
    return LossDifference(
        first=first.label,
        second=second.label,
        common_steps=len(pairs),
        equal_until=equal_until,
        differs_at=differs_at,
        losses=losses,
        largest=largest,
        largest_at=at if largest else None,
    )


def _relative(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other)) if one != other else 0.0
