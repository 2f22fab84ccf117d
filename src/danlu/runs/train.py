"""`danlu.train`: a run on this machine, from a recipe to its last step."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from danlu.report import ProgressDisplay, formatting, write_run_page
from danlu.report.terminal import Console, print_warning
from danlu.runs.prepare import choose_world_size, prepare_run
from danlu.scheduler import Launcher, LaunchProgress, LaunchResult, LocalLauncher, follow, record_end
from danlu.spec import RunFolder, load_plan, load_recipe
from danlu.spec.check import ClusterSource, PlanSource, RecipeSource
from danlu.spec.run_folder import DEFAULT_RUNS_DIR
from danlu.storage.access import restore_umask
from danlu.storage.run_lock import RunError, RunLock


@dataclass(frozen=True)
class TrainResult:
    """How a run ended that did not fail."""

    run: RunFolder
    """Its folder: recipe, plan, events, checkpoints, page."""
    step: int
    """Steps done."""
    loss: float | None
    """Of the last step with a finite one."""
    outcome: Literal["finished", "stopped"]
    """Whether all steps are done, or a signal or `danlu stop` ended it before."""


class TrainError(Exception):
    """A rank failed; the message names it and says why, as the run's last event does."""

    def __init__(self, run: RunFolder, result: LaunchResult) -> None:
        super().__init__(result.failure)
        self.run = run
        self.log_tail = result.log_tail


def train(
    recipe: RecipeSource,
    *,
    plan: PlanSource | None = None,
    cluster: ClusterSource | None = None,
    nproc: int | None = None,
    name: str | None = None,
    settings: Sequence[str] = (),
    folder: str | Path = DEFAULT_RUNS_DIR,
    quiet: bool = False,
) -> TrainResult:
    """Train a recipe on this machine, one process per rank, and return when the run has ended.

    `recipe`, `plan` and `cluster` are files or descriptions; a cluster may be one of the catalog. Without a plan the
    states are sharded over `nproc` ranks, one by default. The run gets a new folder in `folder`, called `name` or after
    the recipe. `settings` such as `"optimizer.learning_rate=1e-4"` change a recipe's file. Progress is printed unless
    `quiet`. In the main thread the first Ctrl-C stops the run after its step and saves a checkpoint.

    Raises `SpecError` before anything is started if the descriptions contradict each other, `TrainError` if a rank
    fails, `RunError` if the run cannot be started.
    """
    console = Console(highlight=False, quiet=quiet)
    with restore_umask():
        world = choose_world_size(nproc, plan)
        run, lock = prepare_run(recipe, plan, cluster, name, world, settings, folder=Path(folder), console=console)
        if plan is None and world > 1:
            console.print(f"no plan given: states sharded over all {world} ranks (plain FSDP)")
        return train_prepared(run, lock, console)


def train_prepared(run: RunFolder, lock: RunLock, console: Console) -> TrainResult:
    """Start the ranks of a prepared folder, show their progress, and write the page.

    A full or read-only disk is reported, and training continues: nothing this process writes is worth failing the run.
    """
    recipe, world = load_recipe(run.recipe), load_plan(run.plan).degrees.world
    size = f"{recipe.steps} steps, {world} rank{'s' * (world > 1)}"
    title = f"run {formatting.relative_path(run.path)}: {recipe.model.name}, {size}, {recipe.precision.label}"
    console.print(title, markup=False)
    if lock.warning:
        print_warning(lock.warning)
    if recipe.resilience.tls:
        print_warning("`resilience.tls` encrypts nothing here: all ranks are on this host, and meet by a private file")
    live = ProgressDisplay(run, console)
    try:
        with lock, LocalLauncher(run, world, lock, restarts=recipe.resilience.restarts) as ranks:
            result = follow_ranks(ranks, live, console)
            record_outcome(run, result)
    except OSError as error:
        raise RunError(f"the ranks could not be started: {error}") from None
    write_page(run)
    history = live.history
    if result.failure and not ranks.stop_requested:
        raise TrainError(run, result)
    end = history.end.outcome if history.end is not None else None
    stopped = end == "stopped" or (ranks.stop_requested and end != "finished")
    return TrainResult(run, history.step, history.loss, "stopped" if stopped else "finished")


def follow_ranks(launcher: Launcher, live: ProgressDisplay, console: Console) -> LaunchResult:
    """Show the progress of a run until its ranks have ended, and why they failed if they did."""

    def show(progress: LaunchProgress) -> None:
        for notice in progress.notices:
            console.print_line(notice, "dim")
        live.update(progress.unwritten_events, progress.phase)

    with live:
        result = follow(launcher, show)
    if result.failure:
        console.print_line(f"{result.failure}; full log: {result.log}", "red")
        for line in result.log_tail:
            console.print_line(f"  {line}", "dim")
    return result


def record_outcome(run: RunFolder, result: LaunchResult) -> None:
    """Record the end of a run whose rank 0 could not; a disk that does not take it is a warning."""
    try:
        if result.killed_on_request:
            record_end(run, "stopped", "killed on request: progress after the newest checkpoint is lost")
        elif result.failure:
            record_end(run, "failed", result.failure)
    except OSError as error:
        print_warning(f"the end of the run could not be recorded in {run.events}: {error.strerror}")


def write_page(run: RunFolder) -> None:
    """Write the page of a run that has events; a disk that does not take it is a warning."""
    if run.events.exists():
        try:
            write_run_page(run)
        except OSError as error:
            remedy = f"`danlu show {run.name}` writes it once there is space"
            print_warning(f"the page could not be written: {error}; {remedy}")
