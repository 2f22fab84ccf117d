"""`danlu train`: a run on this machine, from recipe to page."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from danlu.cli.local import LocalRanks
from danlu.cli.prepare import RUNS, prepare_run
from danlu.report import Live, summary, wording, write_page
from danlu.report.runs import find_run
from danlu.spec import Ended, RunFolder, SpecError, load_plan, load_recipe, toml
from danlu.spec.check import check_all
from danlu.spec.plan import fully_sharded
from danlu.spec.problem import problem_at

_LAST_LINES = 12


def train(
    recipe: Annotated[Path | None, typer.Argument(help="What to train.", metavar="RECIPE.toml")] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Processes; what the plan needs, or 1, if left out.")] = None,
    plan: Annotated[Path | None, typer.Option(help="How it runs; states sharded over all ranks if left out.")] = None,
    cluster: Annotated[str | None, typer.Option(help="A cluster of the catalogue, or its file.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; the recipe's if left out.")] = None,
    resume: Annotated[str | None, typer.Option(metavar="RUN", help="Go on with a run; its layout may change.")] = None,
) -> None:
    """Train on this machine, watch it, and write a page about it."""
    console = Console(highlight=False)
    if (recipe is None) == (resume is None):
        raise typer.BadParameter("give a recipe to start a run, or --resume RUN to go on with one")
    if resume is not None:
        if name is not None:
            raise typer.BadParameter("a resumed run keeps its name: leave --name out")
        run = resumed_run(resume, nproc, plan, cluster)
    else:
        assert recipe is not None
        world = _world(nproc, plan)
        run = prepare_run(recipe, plan, cluster, name, world)
    world = load_plan(run.plan).degrees.world
    if plan is None and resume is None and world > 1:
        console.print(f"no plan given: states sharded over all {world} ranks (plain FSDP)")
    raise typer.Exit(train_run(run, world, console))


def _world(nproc: int | None, plan: Path | None) -> int:
    """Processes to start, as asked for or as the plan needs; both must agree."""
    if plan is None:
        return nproc or 1
    needed = load_plan(plan).degrees.world
    if nproc is not None and nproc != needed:
        line = toml.read(plan).line(("degrees",))
        message = f"lay out {needed} ranks, but --nproc asks for {nproc}"
        raise SpecError([problem_at(plan, line, "degrees", message, f"--nproc {needed}, or leave it out")])
    return needed


def resumed_run(name: str, nproc: int | None, plan: Path | None, cluster: str | None, folder: Path = RUNS) -> RunFolder:
    """The folder of a run to go on with, its plan and cluster replaced if others are given."""
    run = find_run(name, folder)
    if plan is None and nproc in (None, load_plan(run.plan).degrees.world):
        plan = run.plan
    if cluster is None and run.cluster.exists():
        cluster = str(run.cluster)
    _refuse_finished(run)
    world = _world(nproc, plan)
    checked = check_all(run.recipe, plan, cluster, default=fully_sharded(world))
    run.plan.write_text(toml.dumps(checked.plan))
    if checked.cluster is not None:
        run.cluster.write_text(toml.dumps(checked.cluster))
    return run


def _refuse_finished(run: RunFolder) -> None:
    """A run whose steps are all done has nothing to go on with."""
    steps = load_recipe(run.recipe).steps
    done = max((event.step for event in run.read_events() if event.kind in ("step", "ended")), default=0)
    if done >= steps:
        line = toml.read(run.recipe).line(("steps",))
        message = f"is {steps}, and all of them are done"
        raise SpecError([problem_at(run.recipe, line, "steps", message, "raise it to train on")])


def train_run(run: RunFolder, world: int, console: Console) -> int:
    """Start the ranks, show them, and end with the page; the exit code."""
    recipe = load_recipe(run.recipe)
    ranks_text = f"{world} rank{'s' * (world > 1)}"
    console.print(f"run {wording.path(run.path)}: {recipe.model.name}, {recipe.steps} steps, {ranks_text}")
    live = Live(run, console)
    with live, LocalRanks(run, world) as ranks:
        failed = ranks.wait(live.update)
    if failed is not None:
        _record_failure(run, failed, ranks, console)
    if run.events.exists():
        write_page(run)
        console.print(summary(run))
    return 1 if failed is not None else 0


def _record_failure(run: RunFolder, rank: int, ranks: LocalRanks, console: Console) -> None:
    """Say which rank failed first, with its last words, and write it down."""
    code = ranks.processes[rank].returncode
    console.print(Text(f"rank {rank} failed with exit code {code}; all it said: {ranks.log(rank)}", style="red"))
    lines = ranks.log(rank).read_text(errors="replace").splitlines()[-_LAST_LINES:]
    for line in lines:
        console.print(Text(f"  {line}", style="dim"), soft_wrap=True)
    step = max((event.step for event in run.read_events() if event.kind == "step"), default=0)
    message = f"rank {rank} failed with exit code {code}: {lines[-1] if lines else 'it said nothing'}"
    with run.events.open("a") as events:
        ended = Ended(time=time.time(), step=step, outcome="failed", message=message)
        events.write(ended.model_dump_json() + "\n")
