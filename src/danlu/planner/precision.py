"""What a recipe loses by its precision: fp32 is the default, and on most accelerators has a tenth of the peak."""

from dataclasses import dataclass

from danlu.planner.request import PlanRequest
from danlu.planner.search import price_plan
from danlu.spec.cluster import Cluster
from danlu.spec.model import Model
from danlu.spec.plan import Plan
from danlu.spec.recipe import ComputeDtype, Recipe

REFERENCE_DTYPE: ComputeDtype = "bf16"
"""What the recipe's precision is compared with: the range of fp32, so no loss scaling is needed."""
WARN_SPEEDUP = 2.0
"""Ratio of the faster precision's peak to the recipe's from which a warning is shown."""


@dataclass(frozen=True)
class SlowPrecision:
    """A recipe computes in a precision far slower than the chip's best."""

    dtype: ComputeDtype
    peak: float
    """FLOP/s of a chip in it."""
    faster: ComputeDtype
    faster_peak: float
    speedup: float | None
    """Predicted speedup of the same layout's step; None for a custom model."""


def slow_precision(recipe: Recipe, plan: Plan, cluster: Cluster) -> SlowPrecision | None:
    """What a run loses by its precision, from pricing its plan in both; None if that is little or nothing."""
    now, then = recipe.precision.compute, REFERENCE_DTYPE
    peak, faster = cluster.chip.peak.get(now), cluster.chip.peak.get(then)
    if peak is None or faster is None or faster < WARN_SPEEDUP * peak:
        return None
    times = None
    if isinstance(recipe.model, Model):
        times = _seconds(recipe, plan, cluster, now) / _seconds(recipe, plan, cluster, then)
    return SlowPrecision(now, peak, then, faster, times)


def _seconds(recipe: Recipe, plan: Plan, cluster: Cluster, dtype: ComputeDtype) -> float:
    precision = recipe.precision.model_copy(update={"compute": dtype})
    other = recipe.model_copy(update={"precision": precision})
    return price_plan(PlanRequest(recipe=other, cluster=cluster, chips=plan.degrees.world), plan).seconds
