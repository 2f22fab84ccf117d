"""Inside a Slurm job: the batch host writes down who is which rank, then every task becomes its rank.

Hidden commands, called by the script of `danlu launch --on slurm`. They read what Slurm itself puts in the
environment of a job and of a task; the user sets nothing.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from danlu import scheduler
from danlu.scheduler import Ranks, SlurmError
from danlu.spec import Ended, RunFolder, StepReport
from danlu.spec.description import Description

_PATIENCE = 120.0
"""Seconds to wait for this start's ranks.json: a network file system may show the old one for a minute."""

RunArgument = Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="Folder of the run.", show_default=False)]


class Task(Description):
    """What one task of the job is to be."""

    rank: int
    world: int
    local_rank: int
    store: str
    threads: int
    node: str


def slurm_ranks(run: RunArgument) -> None:
    """Write RUN_FOLDER/ranks.json, on the batch host, once a start of the job."""
    try:
        ranks = ranks_of(os.environ)
    except (SlurmError, ValueError, OSError) as error:
        _fail(error)
    scheduler.write_ranks(run, ranks)
    typer.echo(
        f"job {ranks.job}, restart {ranks.restart}: {ranks.world} ranks on {len(ranks.nodes)} nodes, store at "
        f"{ranks.store}; {ranks.remark}"
    )


def slurm_task(run: RunArgument) -> None:
    """Become the rank that ranks.json gives to this task."""
    try:
        ranks = current_ranks(run, os.environ)
        task = task_of(ranks, os.environ)
    except (ValueError, OSError) as error:
        _fail(error)
    _log_to(RunFolder(run).logs / f"rank-{task.rank}.log")
    environment = {**os.environ, "OMP_NUM_THREADS": str(task.threads)}
    options = {"rank": task.rank, "world": task.world, "local-rank": task.local_rank, "store": task.store}
    command = [sys.executable, "-m", "danlu", "worker", str(run)]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    os.execve(sys.executable, command, environment)


def slurm_failed(
    run: RunArgument,
    code: Annotated[int, typer.Argument(metavar="CODE", help="Exit code of srun.", show_default=False)],
) -> None:
    """Write down that the job's tasks have failed: the ranks themselves may not have come to it."""
    folder = RunFolder(run)
    step = max((event.step for event in folder.read_events() if isinstance(event, StepReport)), default=0)
    message = f"job {os.environ.get('SLURM_JOB_ID', 'unknown')} failed with exit code {code}: see {folder.logs}"
    with folder.events.open("a") as events:
        events.write(Ended(time=time.time(), step=step, outcome="failed", message=message).model_dump_json() + "\n")


def ranks_of(environment: Mapping[str, str]) -> Ranks:
    """Ask the controller twice, whatever the job's size: for the topology and for the batch host's address."""
    job = _number(environment, "SLURM_JOB_ID")
    host = _text(environment, "SLURMD_NODENAME")
    nodes = scheduler.expand(_text(environment, "SLURM_JOB_NODELIST"))
    try:
        switches, trouble = scheduler.topology(), ""
    except ValueError as error:  # another topology plugin: the job is worth more than the order of its ranks
        switches, trouble = (), f" (its topology was not understood: {error})"
    order = scheduler.order_nodes(nodes, switches, first=host)
    return Ranks(
        job=job,
        restart=_number(environment, "SLURM_RESTART_COUNT", default=0),
        nodes=order.nodes,
        tasks_per_node=_number(environment, "SLURM_NTASKS_PER_NODE"),
        store=f"{scheduler.node_address(host)}:{scheduler.free_port(job)}",
        remark=order.remark + trouble,
    )


def current_ranks(
    run: Path,
    environment: Mapping[str, str],
    patience: float = _PATIENCE,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Ranks:
    """Read ranks.json of this very start of the job; wait while the file system still shows an older one."""
    wanted = (_number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_RESTART_COUNT", default=0))
    deadline = clock() + patience
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
        f"{run / 'ranks.json'} {expected}, but {seen} after {patience:.0f} s: do all nodes share this folder?"
    )


def task_of(ranks: Ranks, environment: Mapping[str, str]) -> Task:
    """The rank of this task, by its node's place in ranks.json and its own place on the node."""
    node, local_rank = _text(environment, "SLURMD_NODENAME"), _number(environment, "SLURM_LOCALID")
    tasks = _number(environment, "SLURM_NTASKS")
    if tasks != ranks.world:
        raise ValueError(f"srun must start {ranks.world} tasks, as ranks.json says, but starts {tasks} instead")
    return Task(
        rank=ranks.rank(node, local_rank),
        world=ranks.world,
        local_rank=local_rank,
        store=ranks.store,
        threads=_threads(environment, ranks.tasks_per_node),
        node=node,
    )


def _threads(environment: Mapping[str, str], tasks_per_node: int) -> int:
    """Processors of this task: those asked for a task, or its share of those the step has on the node."""
    if "SLURM_CPUS_PER_TASK" in environment:
        return _number(environment, "SLURM_CPUS_PER_TASK")
    return max(1, _number(environment, "SLURM_CPUS_ON_NODE") // tasks_per_node)


def _text(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        raise ValueError(f"{name} must be set by Slurm, but is not: this command is for the script of `danlu launch`")
    return environment[name]


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and not environment.get(name):
        return default
    text = _text(environment, name)
    if not text.isdigit():
        raise ValueError(f'{name} must be a number, but is "{text}" instead')
    return int(text)


def _log_to(path: Path) -> None:
    """Send everything this process and its successor say to the rank's own file; a requeued job appends."""
    path.parent.mkdir(exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def _fail(error: Exception) -> NoReturn:
    typer.echo(str(error), err=True)
    raise typer.Exit(2)
