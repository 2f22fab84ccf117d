"""`danlu train`: a run on this machine, from recipe to page."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from danlu.cli.run_options import ClusterOption, NameOption, PlanOption
from danlu.report import summary
from danlu.report.terminal import Console
from danlu.runs.prepare import prepare_resume
from danlu.runs.train import TrainError, TrainResult, train_prepared
from danlu.runs.train import train as train_recipe
from danlu.scheduler import EXIT_STOPPED
from danlu.spec import RunFolder
from danlu.storage.run_lock import RunLock


def train(
    recipe: Annotated[Path | None, typer.Argument(help="What to train.", metavar="RECIPE.toml")] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Number of processes; default: what the plan needs, or 1.")
    ] = None,
    plan: PlanOption = None,
    cluster: ClusterOption = None,
    name: NameOption = None,
    resume: Annotated[str | None, typer.Option(metavar="RUN", help="Resume a run; its layout may change.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe: optimizer.learning_rate=1e-4; repeatable."),
    ] = None,
) -> None:
    """Train on this machine, show the progress, and write a page about the run.

    `--set` takes dotted keys of the recipe and TOML values; the run's recipe.toml shows the result.
    """
    if recipe is not None and resume is None:
        exit_after(
            lambda: train_recipe(recipe, plan=plan, cluster=cluster, nproc=nproc, name=name, settings=settings or ())
        )
    elif resume is not None and recipe is None:
        train_again(*prepare_resume(resume, nproc, plan, cluster))
    raise typer.BadParameter("give a recipe to start a run, or --resume RUN to resume one")


def train_again(run: RunFolder, lock: RunLock) -> NoReturn:
    """Train a run whose folder is prepared, as `exit_after` does."""
    exit_after(lambda: train_prepared(run, lock, Console(highlight=False)))


def exit_after(train_run: Callable[[], TrainResult]) -> NoReturn:
    """Train, print the summary, and exit: 0 finished, 1 failed, 3 stopped before the last step."""
    try:
        result = train_run()
        run, code = result.run, 0 if result.outcome == "finished" else EXIT_STOPPED
    except TrainError as error:  # its message is printed with the end of the log
        run, code = error.run, 1
    if run.events.exists():
        Console(highlight=False).print(summary(run))
    raise typer.Exit(code)
