"""`danlu launch`: hand a run to the machine's own scheduler."""

import shutil
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from danlu import scheduler
from danlu.cli.follow import follow
from danlu.cli.own_model import check_own_model
from danlu.cli.paths import with_absolute_paths
from danlu.cli.prepare import choose_folder, prepare_run
from danlu.report import Live
from danlu.scheduler import SlurmError, SlurmJob
from danlu.scheduler.job import check_option
from danlu.spec import RunFolder, load_cluster, load_plan
from danlu.spec.check import check_all
from danlu.spec.plan import fully_sharded
from danlu.spec.problem import nearest

_SCHEDULERS = ["slurm"]


def _known_scheduler(name: str) -> str:
    if name not in _SCHEDULERS:
        raise typer.BadParameter(f'"{name}" is not a scheduler Danlu knows; {nearest(name, _SCHEDULERS)}')
    return name


def _sbatch_options(options: list[str] | None) -> list[str]:
    try:
        for option in options or []:
            check_option(option)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return options or []


def launch(
    recipe: Annotated[Path, typer.Argument(help="What to train.", metavar="RECIPE.toml")],
    on: Annotated[str, typer.Option(help="The scheduler: slurm.", callback=_known_scheduler)],
    nodes: Annotated[int, typer.Option(min=1, help="Nodes to ask for.")],
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="What the plan needs, or one a chip of the cluster, or 1 if left out.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="How it runs; states sharded over all ranks if left out.")] = None,
    cluster: Annotated[str | None, typer.Option(help="A cluster of the catalogue, or its file.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; the recipe's if left out.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm's partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm's account.")] = None,
    time: Annotated[str | None, typer.Option(help="Longest run, as Slurm writes it: 1-12:00:00.")] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION", help="A further one for sbatch: --sbatch=--exclusive.", callback=_sbatch_options
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script; write and submit nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run; exit with the job's exit code.")] = False,
) -> None:
    """Start a run on a cluster, through its scheduler, with ranks in the order of its network."""
    ranks = _fitting_ranks(nodes, ranks_per_node, plan, cluster)
    try:
        if not dry_run:
            scheduler.check_installed()
        prepare = _pretend_to_prepare if dry_run else prepare_run
        run = prepare(recipe, plan, cluster, name, nodes * ranks)
        job = SlurmJob(
            name=run.name,
            folder=str(Path.cwd()),
            run=str(run.path),
            python=sys.executable,
            nodes=nodes,
            tasks_per_node=ranks,
            time=time,
            partition=partition,
            account=account,
            extra=tuple(sbatch or ()),
        )
        if dry_run:
            typer.echo(scheduler.render(job), nl=False)
        else:
            raise typer.Exit(_submit(job, run, wait))
    except SlurmError as error:
        _fail(str(error))


def _pretend_to_prepare(
    recipe: Path, plan: Path | None, cluster: str | None, name: str | None, world: int
) -> RunFolder:
    """The folder `prepare_run` would write, with the files checked as it does."""
    checked = check_all(recipe, plan, cluster, default=fully_sharded(world))
    check_own_model(with_absolute_paths(checked.recipe, recipe.parent), recipe, checked.plan, plan)
    return choose_folder(name, checked.recipe.name)


def _submit(job: SlurmJob, run: RunFolder, wait: bool) -> int:
    """Write the script into the run's folder, hand it over, say what the user can do next, and wait if asked to."""
    console = Console(highlight=False, soft_wrap=True)
    run.logs.mkdir(exist_ok=True)
    script = run.path / "job.sbatch"
    script.write_text(scheduler.render(job))
    live = Live(run, console)  # before the job starts: what the events hold by now is history
    try:
        number = scheduler.submit(script)
    except SlurmError as error:
        shutil.rmtree(run.path)  # made a moment ago: the name is free for the next try
        raise SlurmError(f"{error}\nNothing was started; {run.path} was removed again.") from None
    console.print(f"job {number}: {job.nodes} nodes × {job.tasks_per_node} ranks, run {run.path}", markup=False)
    console.print(f"watch: squeue -j {number}, danlu show {run.path}; cancel: scancel {number}", markup=False)
    if not wait:
        return 0
    try:
        return follow(number, run, live, console, scheduler.status)
    except KeyboardInterrupt:
        console.print(f"job {number} goes on; cancel it with: scancel {number}")
        return 130


def _fitting_ranks(nodes: int, asked: int | None, plan: Path | None, cluster: str | None) -> int:
    """Ranks of every node, or an error that says which number would fit."""
    try:
        return scheduler.ranks_per_node(
            nodes, asked, load_plan(plan) if plan else None, load_cluster(cluster) if cluster else None
        )
    except ValueError as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(2)
