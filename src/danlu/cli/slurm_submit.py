"""Submit a run folder to Slurm and follow it: shared by `danlu launch` and `danlu resume --nodes`."""

import shutil
from pathlib import Path

from danlu import scheduler
from danlu.cli.ckpt_ref import fail
from danlu.report import ProgressDisplay, summary, write_run_page
from danlu.report.terminal import Console
from danlu.runs.train import follow_ranks
from danlu.scheduler import SlurmError, SlurmJob, SlurmLauncher
from danlu.scheduler.slurm import SubmissionUncertainError
from danlu.spec import RunFolder, load_cluster, load_plan, load_recipe
from danlu.storage.run_lock import RunLock


def submit_run(job: SlurmJob, run: RunFolder, wait: bool, lock: RunLock, *, fresh: bool) -> int:
    """Submit a job, print what the user can do next, and wait if requested; returns the exit code.

    The folder of a `fresh` run is removed again if Slurm refuses the job.
    """
    console = Console(highlight=False, soft_wrap=True)
    live = ProgressDisplay(run, console)  # before the job starts: events so far are history
    launcher = SlurmLauncher(run, job, lock)
    try:
        launcher.__enter__()
    except SubmissionUncertainError as error:
        raise SlurmError(
            f"{error}\nThe job may be queued nevertheless: `squeue --me` shows it, and it will train in {run.path}, "
            "which is kept. If there is no such job, remove the folder and launch again."
        ) from None
    except SlurmError as error:
        if not fresh:
            raise SlurmError(f"{error}\nNothing was started; {run.path} is unchanged except for plan.toml.") from None
        shutil.rmtree(run.path)  # created a moment ago: the name is free for the next try
        raise SlurmError(f"{error}\nNothing was started; {run.path} was removed again.") from None
    number = launcher.job_id
    console.print(f"job {number}: {job.nodes} nodes × {job.tasks_per_node} ranks, run {run.path}", markup=False)
    if job.spares is not None and not load_recipe(run.recipe).resilience.peers:
        console.print(
            "a lost node costs the steps since the last checkpoint unless the state has replicas on others: "
            "`resilience.peers` in the recipe keeps copies in their memory",
            markup=False,
        )
    console.print(f"watch: squeue -j {number}, danlu show {run.path}; stop: danlu stop {run.path}", markup=False)
    if not wait:
        return 0
    try:
        return follow_job(launcher, live, console)
    except KeyboardInterrupt:
        console.print(f"job {number} continues; stop it with: danlu stop {run.path}", soft_wrap=True)
        return 130


def follow_job(launcher: SlurmLauncher, live: ProgressDisplay, console: Console) -> int:
    """Show the job's state and the run's steps until the job ends; returns the exit code for the shell."""
    result = follow_ranks(launcher, live, console)
    if launcher.run.events.exists():
        console.print(summary(launcher.run))
        try:
            console.print_line(f"page: {write_run_page(launcher.run)}")
        except OSError as error:
            console.print_line(f"the page could not be written: {error}")
    return result.exit_code


def resolve_ranks_per_node(nodes: int, requested: int | None, plan: Path | None, cluster: str | None) -> int:
    """Ranks per node, or an error with the number that would fit."""
    try:
        return scheduler.ranks_per_node(
            nodes, requested, load_plan(plan) if plan else None, load_cluster(cluster) if cluster else None
        )
    except ValueError as error:
        fail(str(error))
