"""`danlu evaluate`: the loss of a checkpoint on held-out data, after or beside the run that saved it."""

import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from danlu.report.terminal import Console
from danlu.runs.dataset import ensure_held_out
from danlu.runs.prepare import check_run, choose_world_size
from danlu.runs.train import TrainError
from danlu.scheduler import LaunchProgress, LocalLauncher, follow
from danlu.spec import EvaluationEvent, Recipe, RunFolder, WarningEvent, load_recipe, toml
from danlu.spec.load import ParsedSpec
from danlu.spec.recipe import EvaluationSource
from danlu.storage.checkpoint.run_store import run_store_location

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
    with tempfile.TemporaryDirectory(prefix="danlu-evaluate-") as folder:
        # Ranks find the run's checkpoints by the name of their folder and the store that their recipe names.
        where = PurePosixPath(run_store_location(run, load_recipe(run.recipe).checkpoint)[0])
        scratch = RunFolder(Path(folder) / where.name)
        scratch.path.mkdir()
        scratch.recipe.write_text(toml.dumps(spec.recipe))
        scratch.plan.write_text(toml.dumps(spec.plan))
        options = ("--evaluate", str(step))
        with LocalLauncher(scratch, world, worker_options=options) as ranks, console.status("starting …") as status:

            def show(progress: LaunchProgress) -> None:
                status.update(f"{progress.phase or 'starting'} …")

            result = follow(ranks, show)
        if result.failure:
            for line in result.log_tail:
                console.print_line(f"  {line}", "dim")
            raise TrainError(run, result)
        events = list(scratch.read_events())
    for event in events:
        if isinstance(event, WarningEvent):
            console.print_line(f"warning {event.message}", "yellow")
    return next(event for event in events if isinstance(event, EvaluationEvent))


def _evaluation_recipe(
    run: RunFolder, data: Sequence[EvaluationSource], tokens: int | None, unplanned_world: int | None
) -> Recipe:
    """The run's recipe with other held-out data, that finds the run's checkpoints from another folder."""
    recipe = load_recipe(run.recipe)
    where, options = run_store_location(run, recipe.checkpoint)
    checkpoint = recipe.checkpoint.model_copy(
        update={"store": where.rpartition("/")[0], "options": dict(options), "near": "", "peers": False}
    )
    held_out = recipe.evaluation.model_copy(
        update={
            "data": tuple(data) or recipe.evaluation.data,
            "tokens": recipe.evaluation.tokens if tokens is None else tokens,
        }
    )
    batch = recipe.batch
    if unplanned_world is not None:
        batch = batch.model_copy(update={"sequences": SEQUENCES_PER_RANK * unplanned_world})
    return recipe.model_copy(update={"checkpoint": checkpoint, "evaluation": held_out, "batch": batch})
