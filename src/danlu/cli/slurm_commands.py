"""Inside a Slurm job: the batch host assigns ranks to nodes, then each task execs its worker.

Hidden commands, called by the script of `danlu launch --on slurm`. They read the environment that Slurm itself sets
for a job and a task; the user sets nothing.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from danlu import scheduler
from danlu.comm.store_client import StoreError
from danlu.comm.store_token import StoreTokenError, read_token
from danlu.scheduler import EXIT_STOPPED, SlurmError
from danlu.scheduler.coordinator import Coordinator
from danlu.scheduler.node_agent import NodeAgent
from danlu.scheduler.slurm import requeue_job
from danlu.scheduler.slurm_task import assign_ranks, env_int, env_text, resolve_task, wait_for_ranks_file
from danlu.spec import EndEvent, RunFolder, load_recipe
from danlu.storage import run_lock
from danlu.storage.access import set_umask
from danlu.storage.run_lock import RunError

_LOCK_TIMEOUT = 60.0
"""Seconds to wait for the lock: the script of the start before a requeue may still be exiting."""

RunArgument = Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="Folder of the run.", show_default=False)]


def slurm_ranks(
    run: RunArgument,
    lock: Annotated[int | None, typer.Option(help="Descriptor of the lock's file that the job's script holds.")] = None,
    spares: Annotated[int | None, typer.Option(min=0, help="Nodes that wait; all nodes have agents.")] = None,
) -> None:
    """Acquire the run's lock for the job's script, then write RUN_FOLDER/ranks.json, once per start."""
    folder = RunFolder(run)
    try:
        job = env_int(os.environ, "SLURM_JOB_ID")
        # A requeued job may start while the script of its earlier start is still exiting.
        held = run_lock.acquire(folder, job=job, descriptor=lock, pid=lock and os.getppid(), wait=_LOCK_TIMEOUT)
        set_umask(load_recipe(folder.recipe).access if folder.recipe.exists() else "owner")
        ranks = assign_ranks(os.environ, spares)
    except (SlurmError, RunError, ValueError, OSError) as error:
        _fail(error)
    if held.warning:
        typer.echo(f"warning: {held.warning}")
    scheduler.write_ranks(run, ranks)
    typer.echo(
        f"job {ranks.job}, restart {ranks.restart}: {ranks.world_size} ranks on {len(ranks.nodes)} nodes, store at "
        f"{ranks.store}; {ranks.remark}"
    )


def slurm_task(run: RunArgument) -> None:
    """Become the rank that ranks.json assigns to this task."""
    try:
        ranks = wait_for_ranks_file(run, os.environ)
        task = resolve_task(ranks, os.environ)
    except (ValueError, OSError) as error:
        _fail(error)
    _redirect_output(RunFolder(run).logs / f"rank-{task.rank}.log")
    environment = {**os.environ, "OMP_NUM_THREADS": str(task.threads)}
    options = {"rank": task.rank, "world": task.world_size, "local-rank": task.local_rank, "store": task.rdzv_endpoint}
    command = [sys.executable, "-m", "danlu.cli.worker", str(run), "--locked"]
    command += ["--store-token", str(run / task.token_file)]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    os.execve(sys.executable, command, environment)


def slurm_coordinate(run: RunArgument) -> None:
    """Keep the ranks of the job going on its nodes; exits with 0 once all have ended well."""
    folder = RunFolder(run)
    try:
        ranks = wait_for_ranks_file(run, os.environ)
        token, restarts = read_token(run / ranks.token_file), load_recipe(folder.recipe).resilience.restarts
        if not restarts:
            raise ValueError("--spares needs `resilience.restarts` above 0 in the recipe: with 0 nothing is replaced")
        coordinator = Coordinator(folder, ranks, token, ranks.control.rpartition(":")[0], restarts)
    except (StoreTokenError, StoreError, ValueError, OSError) as error:
        _fail(error)
    signal.signal(signal.SIGTERM, coordinator.stop)
    try:
        code = coordinator.run_to_end()
    finally:
        coordinator.close()
    if reason := coordinator.recovery.reason:
        typer.echo(reason)
        if coordinator.has_lost_nodes:
            typer.echo("the job is requeued: it resumes from its checkpoint once it has enough nodes again")
            requeue_job(ranks.job)
    raise typer.Exit(code)


def slurm_agent(run: RunArgument) -> None:
    """Start and watch the ranks of this node, as the job's coordinator orders."""
    try:
        ranks = wait_for_ranks_file(run, os.environ)
        token_file = run / ranks.token_file
        agent = NodeAgent(
            RunFolder(run),
            env_text(os.environ, "SLURMD_NODENAME"),
            ranks.control,
            read_token(token_file),
            ranks.world_size,
            ranks.tasks_per_node,
            ("--recoverable", "--served", "--store-token", str(token_file)),
            load_recipe(RunFolder(run).recipe).resilience.tls,
        )
    except (StoreTokenError, StoreError, ValueError, OSError) as error:
        _fail(error)
    if not agent.serve():
        _fail(StoreError(f"the coordinator at {ranks.control} is not reached any more: the ranks of this node ended"))


def slurm_ended(
    run: RunArgument,
    code: Annotated[int, typer.Argument(metavar="CODE", help="Exit code of srun.", show_default=False)],
) -> None:
    """Exit as `danlu train` does, with its exit code; record that tasks have failed if they did not."""
    folder = RunFolder(run)
    *_, end = (None, *folder.read_events())
    holder = run_lock.read_holder(folder)
    # Rank 0 is on this host, whose clock timed the lock: an end before that is of an earlier start.
    if isinstance(end, EndEvent) and end.outcome == "stopped" and holder is not None and end.time >= holder.since:
        raise typer.Exit(EXIT_STOPPED)
    if code == 0:
        return
    outcome = f"job {os.environ.get('SLURM_JOB_ID', 'unknown')} failed with exit code {code}: see {folder.logs}"
    failure = scheduler.first_failure(folder, since=holder.since) if holder is not None else None
    scheduler.record_end(folder, "failed", f"{scheduler.describe_reported(failure)}; {outcome}" if failure else outcome)
    raise typer.Exit(code)


def _redirect_output(path: Path) -> None:
    """Redirect the output of this process and its successor to the rank's log; a requeued job appends."""
    path.parent.mkdir(exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def _fail(error: Exception) -> NoReturn:
    typer.echo(str(error), err=True)
    raise typer.Exit(2)
