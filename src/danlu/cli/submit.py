"""Hand a run's folder to Slurm and follow it: what `danlu launch` and `danlu resume --nodes` share."""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from danlu import scheduler
from danlu.cli.ckpt_place import fail
from danlu.cli.follow import follow
from danlu.report import Live
from danlu.scheduler import SlurmError, SlurmJob
from danlu.scheduler.job import check_option
from danlu.spec import RunFolder, load_cluster, load_plan


def _sbatch_options(options: list[str] | None) -> list[str]:
    try:
        for option in options or []:
            check_option(option)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return options or []


RanksPerNode = Annotated[
    int | None, typer.Option(min=1, help="What the plan needs, or one a chip of the cluster, or 1 if left out.")
]
Partition = Annotated[str | None, typer.Option(help="Slurm's partition.")]
Account = Annotated[str | None, typer.Option(help="Slurm's account.")]
Time = Annotated[str | None, typer.Option(help="Longest run, as Slurm writes it: 1-12:00:00.")]
Sbatch = Annotated[
    list[str] | None,
    typer.Option(metavar="OPTION", help="A further one for sbatch: --sbatch=--exclusive.", callback=_sbatch_options),
]
Wait = Annotated[bool, typer.Option("--wait", help="Follow the run; exit with the job's exit code.")]


@dataclass(frozen=True)
class Request:
    """What to ask of Slurm."""

    nodes: int
    ranks: int
    """On every node."""
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    sbatch: tuple[str, ...] = ()

    def job(self, run: RunFolder) -> SlurmJob:
        """The job of a run."""
        return SlurmJob(
            name=run.name,
            folder=str(Path.cwd()),
            run=str(run.path),
            python=sys.executable,
            nodes=self.nodes,
            tasks_per_node=self.ranks,
            time=self.time,
            partition=self.partition,
            account=self.account,
            extra=self.sbatch,
        )


def submit(job: SlurmJob, run: RunFolder, wait: bool, *, fresh: bool) -> int:
    """Write the script into the run's folder, hand it over, say what the user can do next, and wait if asked to.

    The folder of a `fresh` run goes again if Slurm does not take it.
    """
    console = Console(highlight=False, soft_wrap=True)
    run.logs.mkdir(exist_ok=True)
    script = run.path / "job.sbatch"
    script.write_text(scheduler.render(job))
    live = Live(run, console)  # before the job starts: what the events hold by now is history
    try:
        number = scheduler.submit(script)
    except SlurmError as error:
        if not fresh:
            raise SlurmError(f"{error}\nNothing was started; {run.path} is as it was but for plan.toml.") from None
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


def fitting_ranks(nodes: int, asked: int | None, plan: Path | None, cluster: str | None) -> int:
    """Ranks of every node, or an error that says which number would fit."""
    try:
        return scheduler.ranks_per_node(
            nodes, asked, load_plan(plan) if plan else None, load_cluster(cluster) if cluster else None
        )
    except ValueError as error:
        fail(str(error))
