"""Launch a run through the machine's own scheduler, with ranks in the order of its network. No torch."""

from danlu.scheduler.fit import ranks_per_node
from danlu.scheduler.hostlist import expand
from danlu.scheduler.job import SlurmJob, render
from danlu.scheduler.ranks import Ranks, free_port, read_ranks, write_ranks
from danlu.scheduler.slurm import JobStatus, SlurmError, cancel, check_installed, node_address, status, submit, topology
from danlu.scheduler.topology import NodeOrder, Switch, order_nodes, parse_topology

__all__ = [
    "JobStatus",
    "NodeOrder",
    "Ranks",
    "SlurmError",
    "SlurmJob",
    "Switch",
    "cancel",
    "check_installed",
    "expand",
    "free_port",
    "node_address",
    "order_nodes",
    "parse_topology",
    "ranks_per_node",
    "read_ranks",
    "render",
    "status",
    "submit",
    "topology",
    "write_ranks",
]
