"""Inside a Slurm job: the batch host assigns ranks to nodes, then each task execs its worker.

Hidden commands, called by the script of `danlu launch --on slurm`. They read the environment that Slurm itself sets
for a job and a task; the user sets nothing.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from danlu import scheduler
from danlu.cli.train import EXIT_STOPPED
from danlu.scheduler import RankMap, SlurmError
from danlu.spec import EndEvent, RunFolder, StepEvent, load_recipe
from danlu.spec.description import SpecModel
from danlu.storage import run_lock
from danlu.storage.access import set_umask
from danlu.storage.run_lock import RunError

_RANKS_FILE_TIMEOUT = 120.0
"""Seconds to wait for this start's ranks.json: a network file system may show the old one for a minute."""

_LOCK_TIMEOUT = 60.0
"""Seconds to wait for the lock: the script of the start before a requeue may still be exiting."""

RunArgument = Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="Folder of the run.", show_default=False)]


class SlurmTask(SpecModel):
    """The rank of one task of the job."""

    rank: int
    world_size: int
    local_rank: int
    rdzv_endpoint: str
    threads: int
    node: str


def slurm_ranks(
    run: RunArgument,
    lock: Annotated[int | None, typer.Option(help="Descriptor of the lock's file that the job's script holds.")] = None,
) -> None:
    """Acquire the run's lock for the job's script, then write RUN_FOLDER/ranks.json, once per start."""
    folder = RunFolder(run)
    try:
        job = _env_int(os.environ, "SLURM_JOB_ID")
        # A requeued job may start while the script of its earlier start is still exiting.
        held = run_lock.acquire(folder, job=job, descriptor=lock, pid=lock and os.getppid(), wait=_LOCK_TIMEOUT)
        set_umask(load_recipe(folder.recipe).access if folder.recipe.exists() else "owner")
        ranks = assign_ranks(os.environ)
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
    command = [sys.executable, "-m", "danlu", "worker", str(run), "--locked"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    os.execve(sys.executable, command, environment)


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
    step = max((event.step for event in folder.read_events() if isinstance(event, StepEvent)), default=0)
    message = f"job {os.environ.get('SLURM_JOB_ID', 'unknown')} failed with exit code {code}: see {folder.logs}"
    with folder.events.open("a") as events:
        events.write(EndEvent(time=time.time(), step=step, outcome="failed", message=message).model_dump_json() + "\n")
    raise typer.Exit(code)


def assign_ranks(environment: Mapping[str, str]) -> RankMap:
    """Query the controller twice, whatever the job's size: for the topology and for the batch host's address."""
    job = _env_int(environment, "SLURM_JOB_ID")
    host = _env_text(environment, "SLURMD_NODENAME")
    nodes = scheduler.expand_hostlist(_env_text(environment, "SLURM_JOB_NODELIST"))
    try:
        switches, problem = scheduler.read_topology(), ""
    except ValueError as error:  # another topology plugin: the job matters more than the order of its ranks
        switches, problem = (), f" (its topology was not understood: {error})"
    order = scheduler.order_nodes(nodes, switches, first=host)
    return RankMap(
        job=job,
        restart=_env_int(environment, "SLURM_RESTART_COUNT", default=0),
        nodes=order.nodes,
        tasks_per_node=_env_int(environment, "SLURM_NTASKS_PER_NODE"),
        store=f"{scheduler.get_node_address(host)}:{scheduler.find_free_port(job)}",
        remark=order.remark + problem,
    )


def wait_for_ranks_file(
    run: Path,
    environment: Mapping[str, str],
    timeout: float = _RANKS_FILE_TIMEOUT,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> RankMap:
    """Read ranks.json of this start of the job; wait while the file system still shows an older one."""
    wanted = (_env_int(environment, "SLURM_JOB_ID"), _env_int(environment, "SLURM_RESTART_COUNT", default=0))
    deadline = clock() + timeout
    while True:
        try:
            ranks = scheduler.read_ranks(run)
            seen = f"is of job {ranks.job}, restart {ranks.restart}"
            if (ranks.job, ranks.restart) == wanted:
                return ranks
        except FileNotFoundError:
            seen = "does not exist"
        if clock() >= deadline:
            break
        sleep(1.0)
    expected = f"must be of job {wanted[0]}, restart {wanted[1]}"
    raise ValueError(
        f"{run / 'ranks.json'} {expected}, but {seen} after {timeout:.0f} s: do all nodes share this folder?"
    )


def resolve_task(ranks: RankMap, environment: Mapping[str, str]) -> SlurmTask:
    """The rank of this task, from its node's index in ranks.json and its local rank on the node."""
    node, local_rank = _env_text(environment, "SLURMD_NODENAME"), _env_int(environment, "SLURM_LOCALID")
    tasks = _env_int(environment, "SLURM_NTASKS")
    if tasks != ranks.world_size:
        raise ValueError(f"srun must start {ranks.world_size} tasks, as ranks.json says, but starts {tasks} instead")
    return SlurmTask(
        rank=ranks.rank_of(node, local_rank),
        world_size=ranks.world_size,
        local_rank=local_rank,
        rdzv_endpoint=ranks.store,
        threads=_cpu_threads(environment, ranks.tasks_per_node),
        node=node,
    )


def _cpu_threads(environment: Mapping[str, str], tasks_per_node: int) -> int:
    """CPUs of this task: those requested per task, or its share of the step's CPUs on the node."""
    if "SLURM_CPUS_PER_TASK" in environment:
        return _env_int(environment, "SLURM_CPUS_PER_TASK")
    return max(1, _env_int(environment, "SLURM_CPUS_ON_NODE") // tasks_per_node)


def _env_text(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        raise ValueError(f"{name} must be set by Slurm, but is not: this command is for the script of `danlu launch`")
    return environment[name]


def _env_int(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and not environment.get(name):
        return default
    text = _env_text(environment, name)
    if not text.isdigit():
        raise ValueError(f'{name} must be a number, but is "{text}" instead')
    return int(text)


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
