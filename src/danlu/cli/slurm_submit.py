"""Submit a run folder to Slurm and follow it: shared by `danlu launch` and `danlu resume --nodes`."""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from danlu import scheduler
from danlu.cli.ckpt_ref import fail
from danlu.cli.follow_job import follow_job
from danlu.report import ProgressDisplay
from danlu.report.terminal import Console
from danlu.scheduler import SlurmError, SlurmJob
from danlu.scheduler.sbatch_script import check_sbatch_option
from danlu.spec import RunFolder, load_cluster, load_plan
from danlu.storage.run_lock import RunLock


def _check_sbatch_options(options: list[str] | None) -> list[str]:
    try:
        for option in options or []:
            check_sbatch_option(option)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return options or []


RanksPerNodeOption = Annotated[
    int | None, typer.Option(min=1, help="Default: what the plan needs, or one per chip of the cluster, or 1.")
]
PartitionOption = Annotated[str | None, typer.Option(help="Slurm's partition.")]
AccountOption = Annotated[str | None, typer.Option(help="Slurm's account.")]
TimeLimitOption = Annotated[str | None, typer.Option(help="Time limit in Slurm's format: 1-12:00:00.")]
SbatchOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OPTION", help="A further option for sbatch: --sbatch=--exclusive.", callback=_check_sbatch_options
    ),
]
WaitOption = Annotated[bool, typer.Option("--wait", help="Follow the run; exit with the job's exit code.")]


@dataclass(frozen=True)
class ResourceRequest:
    """Resources to request from Slurm."""

    nodes: int
    ranks_per_node: int
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    sbatch_options: tuple[str, ...] = ()

    def to_job(self, run: RunFolder) -> SlurmJob:
        """The job of a run."""
        return SlurmJob(
            name=run.name,
            workdir=str(Path.cwd()),
            run_folder=str(run.path),
            python=sys.executable,
            nodes=self.nodes,
            tasks_per_node=self.ranks_per_node,
            time=self.time,
            partition=self.partition,
            account=self.account,
            extra_options=self.sbatch_options,
        )


def submit_run(job: SlurmJob, run: RunFolder, wait: bool, lock: RunLock, *, fresh: bool) -> int:
    """Write the script into the run folder, submit it, print what the user can do next, and wait if requested.

    The run's lock is released just before the script is submitted, because the job acquires it. The folder of a `fresh`
    run is removed again if Slurm refuses the job.
    """
    console = Console(highlight=False, soft_wrap=True)
    run.logs.mkdir(exist_ok=True)
    script = run.path / "job.sbatch"
    script.write_text(scheduler.render_sbatch(job))
    live = ProgressDisplay(run, console)  # before the job starts: events so far are history
    lock.release()
    try:
        number = scheduler.submit_script(script)
    except SlurmError as error:
        if not fresh:
            raise SlurmError(f"{error}\nNothing was started; {run.path} is unchanged except for plan.toml.") from None
        shutil.rmtree(run.path)  # created a moment ago: the name is free for the next try
        raise SlurmError(f"{error}\nNothing was started; {run.path} was removed again.") from None
    scheduler.write_job_id(run.path, number)
    console.print(f"job {number}: {job.nodes} nodes × {job.tasks_per_node} ranks, run {run.path}", markup=False)
    console.print(f"watch: squeue -j {number}, danlu show {run.path}; stop: danlu stop {run.path}", markup=False)
    if not wait:
        return 0
    try:
        return follow_job(number, run, live, console, scheduler.get_job_status)
    except KeyboardInterrupt:
        console.print(f"job {number} continues; stop it with: danlu stop {run.path}", soft_wrap=True)
        return 130


def resolve_ranks_per_node(nodes: int, requested: int | None, plan: Path | None, cluster: str | None) -> int:
    """Ranks per node, or an error with the number that would fit."""
    try:
        return scheduler.ranks_per_node(
            nodes, requested, load_plan(plan) if plan else None, load_cluster(cluster) if cluster else None
        )
    except ValueError as error:
        fail(str(error))
