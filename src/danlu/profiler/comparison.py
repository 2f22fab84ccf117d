"""Predicted against measured: the parts of a step as `danlu plan` prices them, beside those of a profile."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from danlu.cost import StepPrediction, predict
from danlu.cost.software import token_dispatch
from danlu.planner.explain import PART_LABELS
from danlu.planner.pricing import software_for
from danlu.planner.request import PlanRequest
from danlu.spec import Cluster, Model, Plan, Recipe
from danlu.spec.profile import RankProfile

JOINED = {"pipeline": ("transfer", "bubble")}
"""Parts that are compared as one: a rank that waits for a tensor cannot tell how long it was on its way."""
LABELS = {
    **{part: label for part, label in PART_LABELS.items() if part not in JOINED["pipeline"]},
    "pipeline": "between stages, and pipeline bubble (pp)",
    "waiting": "host between operators (Python, autograd)",
}


@dataclass(frozen=True)
class ComparedPart:
    """One part of a step, in seconds."""

    part: str
    predicted: float | None
    """None if nothing was predicted."""
    measured: float
    """Mean of all profiled steps and ranks."""
    lowest: float
    highest: float
    """Of all profiled steps and ranks."""

    @property
    def label(self) -> str:
        """Its name for people."""
        return LABELS.get(self.part, self.part)

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None without a prediction that is above zero."""
        return self.measured / self.predicted if self.predicted else None

    @property
    def error(self) -> float:
        """Seconds by which the prediction is off."""
        return abs(self.measured - (self.predicted or 0.0))


def predict_step(recipe: Recipe, plan: Plan, cluster: Cluster | None) -> StepPrediction | None:
    """What `danlu plan` predicts for a plan; None without a cluster, or for a custom model.

    Raises `PlanRequestError` if the cluster says too little of its chip.
    """
    if cluster is None or not isinstance(recipe.model, Model):
        return None
    request = PlanRequest(recipe=recipe, cluster=cluster, chips=plan.degrees.world)
    software = software_for(
        request,
        plan.recompute,
        regather_inputs=plan.regather_inputs,
        compiled=plan.compile,
        dispatch=token_dispatch(plan),
    )
    return predict(recipe.model, plan, recipe.batch, cluster, software, request.matmul_dtype)


def compare_parts(profiles: Sequence[RankProfile], prediction: StepPrediction | None) -> list[ComparedPart]:
    """Every part that was measured or predicted, the one with the largest error first."""
    measured = [_joined(step.parts) for profile in profiles for step in profile.steps]
    predicted = _joined(prediction.parts) if prediction else None
    names = dict.fromkeys(part for parts in (*measured, predicted or {}) for part in parts)
    rows = []
    for part in names:
        times = [parts.get(part, 0.0) for parts in measured]
        guess = None if predicted is None else predicted.get(part, 0.0)
        if guess or any(times):
            rows.append(ComparedPart(part, guess, fmean(times), min(times), max(times)))
    return sorted(rows, key=lambda row: -row.error)


def compare_total(profiles: Sequence[RankProfile], prediction: StepPrediction | None) -> ComparedPart:
    """The whole step, measured by the training loop's clock."""
    times = [step.seconds for profile in profiles for step in profile.steps]
    return ComparedPart("step", prediction.seconds if prediction else None, fmean(times), min(times), max(times))


def largest_gap(profiles: Sequence[RankProfile]) -> float:
    """How far the parts of a step are from the loop's own measure of it, as a share; the worst step of all ranks."""
    return max(abs(sum(step.parts.values()) / step.seconds - 1) for profile in profiles for step in profile.steps)


def profiler_slowdown(profiles: Sequence[RankProfile]) -> float:
    """How much longer profiled steps took than the same ranks' steps without a profiler, as a share."""
    profiled = fmean(step.seconds for profile in profiles for step in profile.steps)
    return profiled / fmean(seconds for profile in profiles for seconds in profile.unprofiled_seconds) - 1


def _joined(parts: Mapping[str, float]) -> dict[str, float]:
    found = dict(parts)
    for name, members in JOINED.items():
        if any(member in found for member in members):
            found[name] = sum(found.pop(member, 0.0) for member in members)
    return found
