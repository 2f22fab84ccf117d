"""Checks a recipe, a plan and a cluster for contradictions; reports all of them at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from danlu.spec.cluster import Cluster
from danlu.spec.description import SpecModel
from danlu.spec.load import ParsedSpec, read_cluster, read_plan, read_recipe
from danlu.spec.model import Model
from danlu.spec.plan import Plan
from danlu.spec.problem import Problem, SpecError
from danlu.spec.recipe import Recipe
from danlu.spec.recipe_paths import resolve_recipe_paths
from danlu.spec.rules import (
    CHIP_RULES,
    CUSTOM_LAYOUT_RULES,
    DECODER_LAYOUT_RULES,
    DECODER_RECIPE_RULES,
    LAYOUT_RULES,
    NETWORK_RULES,
    PLAN_RULES,
    RECIPE_RULES,
    mapping_needs_cluster,
)
from danlu.spec.toml import TomlDocument

RecipeSource = str | Path | Recipe
"""A file or the description itself, whose paths are relative to the working directory."""
PlanSource = str | Path | Plan
ClusterSource = str | Path | Cluster
"""The name of a cluster of the catalog, a file, or the description itself."""
R = TypeVar("R")
D = TypeVar("D", bound=SpecModel)


@dataclass(frozen=True)
class RunSpec:
    """The descriptions of a run, parsed and free of contradictions; the recipe's paths are absolute."""

    recipe: Recipe
    plan: Plan
    cluster: Cluster | None
    recipe_document: TomlDocument
    """The recipe's file, so that later problems can name its line; empty if the recipe has none."""
    plan_document: TomlDocument


def load_run_spec(
    recipe: RecipeSource,
    plan: PlanSource | None = None,
    cluster: ClusterSource | None = None,
    default: Plan | None = None,
    settings: Sequence[str] = (),
) -> RunSpec:
    """Read the descriptions of a run and check them against each other; raises `SpecError` with all problems of all.

    Without a plan `default` is checked instead; without that, one rank. `settings` such as `steps=10` override a
    recipe's file.
    """
    problems: list[Problem] = []
    if isinstance(recipe, Recipe):
        if settings:
            raise TypeError("settings override a recipe's file; change a recipe with `recipe.model_copy(update=…)`")
        read: ParsedSpec[Recipe] | None = parsed_without_file(recipe, "recipe")
    else:
        read = _try_read(lambda: read_recipe(Path(recipe), settings), problems)
    if isinstance(plan, str | Path):
        layout = _try_read(lambda: read_plan(Path(plan)), problems)
    else:
        layout = parsed_without_file(plan or default or Plan(), "plan" if plan else "plan (default)")
    network: ParsedSpec[Cluster] | None = None
    if isinstance(cluster, Cluster):
        network = parsed_without_file(cluster, "cluster")
    elif cluster is not None:
        network = _try_read(lambda: read_cluster(str(cluster)), problems)
    problems += _contradictions(read, layout, network)
    if layout and cluster is None:
        problems += mapping_needs_cluster(layout)
    if problems or read is None or layout is None:
        raise SpecError(_in_order(problems))
    resolved = resolve_recipe_paths(read.value, read.document.path.parent)
    return RunSpec(resolved, layout.value, network.value if network else None, read.document, layout.document)


def find_problems(
    recipe: ParsedSpec[Recipe], plan: ParsedSpec[Plan], cluster: ParsedSpec[Cluster] | None = None
) -> list[Problem]:
    """Every contradiction between descriptions that are each valid."""
    problems = _contradictions(recipe, plan, cluster)
    return _in_order(problems if cluster else [*problems, *mapping_needs_cluster(plan)])


def parsed_without_file(value: D, label: str = "plan (default)") -> ParsedSpec[D]:
    """A description without a file; its problems point at `label`."""
    return ParsedSpec(value, TomlDocument(Path(label), {}, {}))


def _contradictions(
    recipe: ParsedSpec[Recipe] | None, plan: ParsedSpec[Plan] | None, cluster: ParsedSpec[Cluster] | None
) -> list[Problem]:
    """Problems from all rules whose files could be read."""
    problems: list[Problem] = []
    described = recipe is not None and isinstance(recipe.value.model, Model)
    if recipe:
        rules = (*RECIPE_RULES, *DECODER_RECIPE_RULES) if described else RECIPE_RULES
        problems += [problem for rule in rules for problem in rule(recipe)]
    if plan:
        problems += [problem for rule in PLAN_RULES for problem in rule(plan)]
    if recipe and plan:
        special = DECODER_LAYOUT_RULES if described else CUSTOM_LAYOUT_RULES
        problems += [problem for rule in (*special, *LAYOUT_RULES) for problem in rule(recipe, plan)]
    if plan and cluster:
        problems += [problem for rule in NETWORK_RULES for problem in rule(plan, cluster)]
    if recipe and cluster:
        problems += [problem for rule in CHIP_RULES for problem in rule(recipe, cluster)]
    return problems


def _in_order(problems: list[Problem]) -> list[Problem]:
    return sorted(problems, key=lambda problem: (problem.file, problem.line))


def _try_read(read: Callable[[], R], problems: list[Problem]) -> R | None:
    """Read a file, or add its problems to `problems`."""
    try:
        return read()
    except SpecError as error:
        problems += error.problems
        return None
