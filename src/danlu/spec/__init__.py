"""The vocabulary every room speaks: frozen, strict descriptions that round-trip through text. No torch."""

from danlu.spec.cluster import Chip, Cluster, Collective, Curve, Failures, Level, Operation, Operator, Tier
from danlu.spec.event import Ended, Event, Rehearsed, Resumed, Saved, Started, StepReport, Warned
from danlu.spec.load import load_cluster, load_plan, load_recipe
from danlu.spec.model import Model, Moe, RopeScaling
from danlu.spec.plan import Degrees, Pipeline, Plan
from danlu.spec.problem import Problem, SpecError
from danlu.spec.recipe import Recipe
from danlu.spec.run import RunFolder

__all__ = [
    "Chip",
    "Cluster",
    "Collective",
    "Curve",
    "Degrees",
    "Ended",
    "Event",
    "Failures",
    "Level",
    "Model",
    "Moe",
    "Operation",
    "Operator",
    "Pipeline",
    "Plan",
    "Problem",
    "Recipe",
    "Rehearsed",
    "Resumed",
    "RopeScaling",
    "RunFolder",
    "Saved",
    "SpecError",
    "Started",
    "StepReport",
    "Tier",
    "Warned",
    "load_cluster",
    "load_plan",
    "load_recipe",
]
