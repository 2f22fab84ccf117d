"""Contradictions between the settings of a recipe, a plan and a cluster, all of them at once."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from danlu.spec.cluster import Cluster
from danlu.spec.load import Sourced, read_cluster, read_plan, read_recipe
from danlu.spec.model import Model
from danlu.spec.plan import Plan
from danlu.spec.problem import Problem, SpecError
from danlu.spec.recipe import Recipe
from danlu.spec.rules import (
    CHIP_RULES,
    DESCRIBED_LAYOUT_RULES,
    DESCRIBED_RECIPE_RULES,
    LAYOUT_RULES,
    NETWORK_RULES,
    OWN_LAYOUT_RULES,
    PLAN_RULES,
    RECIPE_RULES,
    mapping_needs_cluster,
)
from danlu.spec.toml import Document

R = TypeVar("R")


@dataclass(frozen=True)
class Checked:
    """Three files that were read and do not contradict each other."""

    recipe: Recipe
    plan: Plan
    cluster: Cluster | None


def check_all(
    recipe: Path, plan: Path | None = None, cluster: str | None = None, default: Plan | None = None
) -> Checked:
    """Read the files of a run and hold them against each other; raises `SpecError` with every problem of all of them.

    Without the file of a plan `default` is checked in its place: one rank where that is left out too.
    """
    problems: list[Problem] = []
    read = _collect(lambda: read_recipe(recipe), problems)
    layout = in_memory(default or Plan()) if plan is None else _collect(lambda: read_plan(plan), problems)
    network = None if cluster is None else _collect(lambda: read_cluster(cluster), problems)
    problems += _contradictions(read, layout, network)
    if layout and cluster is None:
        problems += mapping_needs_cluster(layout)
    if problems or read is None or layout is None:
        raise SpecError(_in_order(problems))
    return Checked(read.value, layout.value, network.value if network else None)


def check(recipe: Sourced[Recipe], plan: Sourced[Plan], cluster: Sourced[Cluster] | None = None) -> list[Problem]:
    """Every contradiction between three descriptions that are fine by themselves."""
    problems = _contradictions(recipe, plan, cluster)
    return _in_order(problems if cluster else [*problems, *mapping_needs_cluster(plan)])


def in_memory(plan: Plan) -> Sourced[Plan]:
    """A plan that no file holds; a problem with it points at `plan (default)`."""
    return Sourced(plan, Document(Path("plan (default)"), {}, {}))


def _contradictions(
    recipe: Sourced[Recipe] | None, plan: Sourced[Plan] | None, cluster: Sourced[Cluster] | None
) -> list[Problem]:
    """What the rules find whose files could be read."""
    problems: list[Problem] = []
    described = recipe is not None and isinstance(recipe.value.model, Model)
    if recipe:
        rules = (*RECIPE_RULES, *DESCRIBED_RECIPE_RULES) if described else RECIPE_RULES
        problems += [problem for rule in rules for problem in rule(recipe)]
    if plan:
        problems += [problem for rule in PLAN_RULES for problem in rule(plan)]
    if recipe and plan:
        special = DESCRIBED_LAYOUT_RULES if described else OWN_LAYOUT_RULES
        problems += [problem for rule in (*special, *LAYOUT_RULES) for problem in rule(recipe, plan)]
    if plan and cluster:
        problems += [problem for rule in NETWORK_RULES for problem in rule(plan, cluster)]
    if recipe and cluster:
        problems += [problem for rule in CHIP_RULES for problem in rule(recipe, cluster)]
    return problems


def _in_order(problems: list[Problem]) -> list[Problem]:
    return sorted(problems, key=lambda problem: (problem.file, problem.line))


def _collect(read: Callable[[], R], problems: list[Problem]) -> R | None:
    """Read a file, or add what is wrong with it to `problems`."""
    try:
        return read()
    except SpecError as error:
        problems += error.problems
        return None
