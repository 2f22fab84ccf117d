"""Launch a run through Slurm, with ranks in the order of the network. No torch."""

from danlu.scheduler.hostlist import expand_hostlist
from danlu.scheduler.rank_count import ranks_per_node
from danlu.scheduler.rank_map import RankMap, find_free_port, read_job_id, read_ranks, write_job_id, write_ranks
from danlu.scheduler.sbatch_script import SlurmJob, render_sbatch
from danlu.scheduler.slurm import (
    JobStatus,
    SlurmError,
    cancel_job,
    check_slurm_installed,
    get_job_status,
    get_node_address,
    read_topology,
    request_stop,
    submit_script,
)
from danlu.scheduler.topology import NodeOrder, Switch, order_nodes, parse_topology

__all__ = [
    "JobStatus",
    "NodeOrder",
    "RankMap",
    "SlurmError",
    "SlurmJob",
    "Switch",
    "cancel_job",
    "check_slurm_installed",
    "expand_hostlist",
    "find_free_port",
    "get_job_status",
    "get_node_address",
    "order_nodes",
    "parse_topology",
    "ranks_per_node",
    "read_job_id",
    "read_ranks",
    "read_topology",
    "render_sbatch",
    "request_stop",
    "submit_script",
    "write_job_id",
    "write_ranks",
]
