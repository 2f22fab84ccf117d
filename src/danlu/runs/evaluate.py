"""`danlu evaluate`: the loss of a checkpoint on held-out data, after or beside the run that saved it."""

from collections.abc import Sequence
from pathlib import Path

from danlu.report.terminal import Console
from danlu.runs.dataset import ensure_held_out
from danlu.runs.prepare import check_run, choose_world_size
from danlu.runs.scratch_run import recipe_beside_run, scratch_run
from danlu.spec import EvaluationEvent, Recipe, RunFolder
from danlu.spec.load import ParsedSpec
from danlu.spec.recipe import EvaluationSource

SEQUENCES_PER_RANK = 4
"""Sequences of one forward pass where no plan says how many: enough to keep a chip busy, few enough to fit."""


def evaluate(
    run: RunFolder,
    step: int,
    data: Sequence[EvaluationSource] = (),
    *,
    tokens: int | None = None,
    plan: Path | None = None,
    nproc: int | None = None,
    console: Console | None = None,
) -> EvaluationEvent:
    """Evaluate the checkpoint of a run's step on local ranks; on the run's own held-out data if `data` is empty.

    The run is only read, and may be training. Without a plan the weights are sharded over `nproc` ranks.
    """
    console = console or Console(quiet=True)
    world = choose_world_size(nproc, plan)
    recipe = _evaluation_recipe(run, data, tokens, world if plan is None else None)
    spec = check_run(recipe, plan, None, world)
    ensure_held_out(ParsedSpec(spec.recipe, spec.recipe_document), console)
    with scratch_run(spec, run, console, ("--evaluate", str(step))) as scratch:
        return next(event for event in scratch.read_events() if isinstance(event, EvaluationEvent))


def _evaluation_recipe(
    run: RunFolder, data: Sequence[EvaluationSource], tokens: int | None, unplanned_world: int | None
) -> Recipe:
    """The run's recipe with other held-out data, that finds the run's checkpoints from another folder."""
    recipe = recipe_beside_run(run)
    held_out = recipe.evaluation.model_copy(
        update={
            "data": tuple(data) or recipe.evaluation.data,
            "tokens": recipe.evaluation.tokens if tokens is None else tokens,
        }
    )
    batch = recipe.batch
    if unplanned_world is not None:
        batch = batch.model_copy(update={"sequences": SEQUENCES_PER_RANK * unplanned_world, "ramp": ()})
    return recipe.model_copy(update={"evaluation": held_out, "batch": batch})
