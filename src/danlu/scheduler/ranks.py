"""`ranks.json`: written once by the batch host, read once by every task, so that no task asks the controller."""

import os
import socket
from pathlib import Path

from pydantic import ValidationError

from danlu.spec.description import Count, Description, Many

FILE = "ranks.json"
_PORTS = range(20_000, 32_768)
"""Below the ports Linux hands out for outgoing connections, so that none of those takes the store's."""


class Ranks(Description):
    """Which node holds which ranks, and where the ranks meet."""

    job: int
    restart: int
    """Times Slurm has requeued the job; a task that reads the file of an earlier start knows it by this."""
    nodes: Many[str]
    """In order of ranks: node i holds ranks i × tasks_per_node and the following."""
    tasks_per_node: Count
    store: str
    """HOST:PORT of rank 0's store, on the batch host."""
    remark: str
    """What the order of the nodes follows."""

    @property
    def world(self) -> int:
        """Ranks of the whole job."""
        return len(self.nodes) * self.tasks_per_node

    def rank(self, node: str, local_rank: int) -> int:
        """The rank of a node's task; `ValueError` names a node or a task the file does not hold."""
        if node not in self.nodes:
            raise ValueError(
                f"node {node} must be one of the job's {len(self.nodes)} nodes, but {FILE} has no such node"
            )
        if local_rank not in range(self.tasks_per_node):
            raise ValueError(f"the task must be one of {self.tasks_per_node} on {node}, but is number {local_rank}")
        return self.nodes.index(node) * self.tasks_per_node + local_rank


def write_ranks(folder: Path, ranks: Ranks) -> None:
    """Put the file in place whole: a reader sees the old one or the new one."""
    fresh = folder / f".{FILE}.{ranks.job}.{ranks.restart}"
    with fresh.open("w") as file:
        file.write(ranks.model_dump_json(indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(folder / FILE)


def read_ranks(folder: Path) -> Ranks:
    """Read the file; `OSError` when it is not there, `ValueError` when it is not ours."""
    try:
        return Ranks.model_validate_json((folder / FILE).read_bytes())
    except ValidationError as error:
        raise ValueError(f"{folder / FILE} is not a file that `danlu slurm-ranks` wrote: {error}") from None


def free_port(job: int) -> int:
    """A port of this host that nobody listens on; two jobs that share the host start their search apart."""
    start = job % len(_PORTS)
    for port in (*_PORTS[start:], *_PORTS[:start]):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port between {_PORTS.start} and {_PORTS.stop - 1} is free on {socket.gethostname()}")
