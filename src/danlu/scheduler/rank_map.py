"""`ranks.json`: written once by the batch host, read once by every task, so that no task queries the controller."""

import os
import socket
from pathlib import Path

from pydantic import ValidationError

from danlu.comm.store_token import make_token
from danlu.spec.description import PositiveInt, SpecModel, TupleOf

RANKS_FILE = "ranks.json"
_TOKEN_PREFIX = ".store-token."
_PORT_RANGE = range(20_000, 32_768)
"""Below Linux's ephemeral ports, so that no outgoing connection takes the store's port."""


class RankMap(SpecModel):
    """The ranks of each node, and the rendezvous endpoint."""

    job: int
    restart: int
    """Times Slurm has requeued the job; it identifies a file of an earlier start."""
    nodes: TupleOf[str]
    """In order of ranks: the ranks of node i start at i × tasks_per_node."""
    tasks_per_node: PositiveInt
    store: str
    """HOST:PORT of rank 0's store, on the batch host."""
    spares: TupleOf[str] = ()
    """Nodes that wait to take the place of one that is lost."""
    control: str = ""
    """HOST:PORT of the coordinator's store, if nodes have agents."""
    remark: str
    """What the order of the nodes follows."""

    @property
    def token_file(self) -> str:
        """Name of the file in the run's folder with the token of the store: another one for every start."""
        return f"{_TOKEN_PREFIX}{self.job}.{self.restart}"

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return len(self.nodes) * self.tasks_per_node

    def rank_of(self, node: str, local_rank: int) -> int:
        """The rank of a node's task; `ValueError` for a node or a task that the file does not have."""
        if node not in self.nodes:
            raise ValueError(
                f"node {node} must be one of the job's {len(self.nodes)} nodes, but {RANKS_FILE} has no such node"
            )
        if local_rank not in range(self.tasks_per_node):
            raise ValueError(f"the task must be one of {self.tasks_per_node} on {node}, but is number {local_rank}")
        return self.nodes.index(node) * self.tasks_per_node + local_rank


def write_ranks(folder: Path, ranks: RankMap) -> None:
    """Replace the file atomically, after the token of the store: a reader sees the old one or the new one."""
    for old in folder.glob(f"{_TOKEN_PREFIX}*"):
        old.unlink()
    make_token(folder / ranks.token_file)
    fresh = folder / f".{RANKS_FILE}.{ranks.job}.{ranks.restart}"
    with fresh.open("w") as file:
        file.write(ranks.model_dump_json(indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(folder / RANKS_FILE)


def read_ranks(folder: Path) -> RankMap:
    """Read the file; `OSError` if it does not exist, `ValueError` if its contents are invalid."""
    try:
        return RankMap.model_validate_json((folder / RANKS_FILE).read_bytes())
    except ValidationError as error:
        raise ValueError(f"{folder / RANKS_FILE} is not a file that `danlu slurm-ranks` wrote: {error}") from None


JOB_FILE = "job.json"


class SubmittedJob(SpecModel):
    """The Slurm job of a run."""

    job: int


def write_job_id(folder: Path, job: int) -> None:
    """Record a job's id in the run's folder, so that it can be stopped before it has started."""
    (folder / JOB_FILE).write_text(SubmittedJob(job=job).model_dump_json() + "\n")


def read_job_id(folder: Path) -> int | None:
    """The id of the job that a run was last submitted as, if any."""
    try:
        return SubmittedJob.model_validate_json((folder / JOB_FILE).read_bytes()).job
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ValueError(f"{folder / JOB_FILE} is not a file that `danlu launch` wrote: {error}") from None


def find_free_port(job: int, besides: int = 0) -> int:
    """A free port of this host, not `besides`; two jobs that share the host start their search at different ports."""
    start = job % len(_PORT_RANGE)
    for port in (*_PORT_RANGE[start:], *_PORT_RANGE[:start]):
        if port == besides:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port between {_PORT_RANGE.start} and {_PORT_RANGE.stop - 1} is free on {socket.gethostname()}")
