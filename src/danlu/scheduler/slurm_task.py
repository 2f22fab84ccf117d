"""Inside a Slurm job: the ranks of its nodes, and the rank of a task, from the variables that Slurm itself sets."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from danlu.scheduler.hostlist import expand_hostlist
from danlu.scheduler.rank_map import RankMap, find_free_port, read_ranks
from danlu.scheduler.slurm import get_node_address, read_topology
from danlu.scheduler.topology import order_nodes
from danlu.spec.description import SpecModel

_RANKS_FILE_TIMEOUT = 120.0
"""Seconds to wait for this start's ranks.json: a network file system may show the old one for a minute."""


class SlurmTask(SpecModel):
    """The rank of one task of the job."""

    rank: int
    world_size: int
    local_rank: int
    rdzv_endpoint: str
    token_file: str
    """In the run's folder."""
    threads: int
    node: str


def assign_ranks(environment: Mapping[str, str], spares: int | None = None) -> RankMap:
    """Query the controller twice, whatever the job's size: for the topology and for the batch host's address.

    With `spares`, the last so many nodes wait, and all nodes have agents.
    """
    job = env_int(environment, "SLURM_JOB_ID")
    host = env_text(environment, "SLURMD_NODENAME")
    nodes = expand_hostlist(env_text(environment, "SLURM_JOB_NODELIST"))
    try:
        switches, problem = read_topology(), ""
    except ValueError as error:  # another topology plugin: the job matters more than the order of its ranks
        switches, problem = (), f" (its topology was not understood: {error})"
    order = order_nodes(nodes, switches, first=host)
    used = len(order.nodes) - (spares or 0)
    address, port = get_node_address(host), find_free_port(job)
    return RankMap(
        job=job,
        restart=env_int(environment, "SLURM_RESTART_COUNT", default=0),
        nodes=order.nodes[:used],
        tasks_per_node=env_int(environment, "SLURM_NTASKS_PER_NODE"),
        store=f"{address}:{port}",
        spares=order.nodes[used:],
        control="" if spares is None else f"{address}:{find_free_port(job, besides=port)}",
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
    wanted = (env_int(environment, "SLURM_JOB_ID"), env_int(environment, "SLURM_RESTART_COUNT", default=0))
    deadline = clock() + timeout
    while True:
        try:
            ranks = read_ranks(run)
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
    node, local_rank = env_text(environment, "SLURMD_NODENAME"), env_int(environment, "SLURM_LOCALID")
    tasks = env_int(environment, "SLURM_NTASKS")
    if tasks != ranks.world_size:
        raise ValueError(f"srun must start {ranks.world_size} tasks, as ranks.json says, but starts {tasks} instead")
    return SlurmTask(
        rank=ranks.rank_of(node, local_rank),
        world_size=ranks.world_size,
        local_rank=local_rank,
        rdzv_endpoint=ranks.store,
        token_file=ranks.token_file,
        threads=_cpu_threads(environment, ranks.tasks_per_node),
        node=node,
    )


def _cpu_threads(environment: Mapping[str, str], tasks_per_node: int) -> int:
    """CPUs of this task: those requested per task, or its share of the step's CPUs on the node."""
    if "SLURM_CPUS_PER_TASK" in environment:
        return env_int(environment, "SLURM_CPUS_PER_TASK")
    return max(1, env_int(environment, "SLURM_CPUS_ON_NODE") // tasks_per_node)


def env_text(environment: Mapping[str, str], name: str) -> str:
    """A variable that Slurm sets; `ValueError` without it."""
    if not environment.get(name):
        raise ValueError(f"{name} must be set by Slurm, but is not: this command is for the script of `danlu launch`")
    return environment[name]


def env_int(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The same as a number."""
    if default is not None and not environment.get(name):
        return default
    text = env_text(environment, name)
    if not text.isdigit():
        raise ValueError(f'{name} must be a number, but is "{text}" instead')
    return int(text)
