"""Ranks beside a run: in a scratch folder, from which they read the run's checkpoints and leave the run alone."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from danlu.report.terminal import Console
from danlu.runs.train import TrainError
from danlu.scheduler import LaunchProgress, LocalLauncher, follow
from danlu.spec import Recipe, RunFolder, WarningEvent, load_recipe, toml
from danlu.spec.check import RunSpec
from danlu.storage.checkpoint.run_store import run_store_location


def recipe_beside_run(run: RunFolder) -> Recipe:
    """The run's recipe, with which ranks find the run's checkpoints from a scratch folder."""
    recipe = load_recipe(run.recipe)
    where, options = run_store_location(run, recipe.checkpoint)
    checkpoint = recipe.checkpoint.model_copy(
        update={"store": where.rpartition("/")[0], "options": dict(options), "near": "", "peers": False}
    )
    return recipe.model_copy(update={"checkpoint": checkpoint})


@contextmanager
def scratch_run(
    spec: RunSpec, run: RunFolder | None, console: Console, worker_options: Sequence[str]
) -> Iterator[RunFolder]:
    """Start local ranks with options of a worker, and yield their folder once they have ended; then it is removed.

    They find the checkpoints of `run`, if there is one. Raises `TrainError` if a rank fails.
    """
    with tempfile.TemporaryDirectory(prefix="danlu-") as folder:
        scratch = RunFolder(Path(folder) / (spec.recipe.name if run is None else _name_in_store(run)))
        scratch.path.mkdir()
        scratch.recipe.write_text(toml.dumps(spec.recipe))
        scratch.plan.write_text(toml.dumps(spec.plan))
        if spec.cluster is not None:
            scratch.cluster.write_text(toml.dumps(spec.cluster))
        if run is not None and run.data.exists():
            shutil.copyfile(run.data, scratch.data)  # which data the run reads from which sample on
        world = spec.plan.degrees.world
        with LocalLauncher(scratch, world, worker_options=worker_options) as ranks, console.status("starting …") as bar:

            def show(progress: LaunchProgress) -> None:
                bar.update(f"{progress.phase or 'starting'} …")

            result = follow(ranks, show)
        if result.failure:
            for line in result.log_tail:
                console.print_line(f"  {line}", "dim")
            raise TrainError(run or scratch, result)
        for event in scratch.read_events() if scratch.events.exists() else ():
            if isinstance(event, WarningEvent):
                console.print_line(f"warning {event.message}", "yellow")
        yield scratch


def _name_in_store(run: RunFolder) -> str:
    """Ranks find checkpoints by the name of their folder and the store that their recipe names."""
    return PurePosixPath(run_store_location(run, load_recipe(run.recipe).checkpoint)[0]).name
