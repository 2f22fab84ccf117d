"""Start the ranks of a run, here or through Slurm in the order of the network; follow and stop them. No torch."""

from danlu.scheduler.hostlist import expand_hostlist
from danlu.scheduler.launcher import EXIT_STOPPED, Launcher, LaunchProgress, LaunchResult, follow, record_end
from danlu.scheduler.local_launcher import LocalLauncher
from danlu.scheduler.rank_count import ranks_per_node
from danlu.scheduler.rank_failure import describe_reported, first_failure
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
from danlu.scheduler.slurm_launcher import SlurmLauncher
from danlu.scheduler.stop_run import cancel_pending_job, stop_run
from danlu.scheduler.topology import NodeOrder, Switch, order_nodes, parse_topology

__all__ = [
    "EXIT_STOPPED",
    "JobStatus",
    "LaunchProgress",
    "LaunchResult",
    "Launcher",
    "LocalLauncher",
    "NodeOrder",
    "RankMap",
    "SlurmError",
    "SlurmJob",
    "SlurmLauncher",
    "Switch",
    "cancel_job",
    "cancel_pending_job",
    "check_slurm_installed",
    "describe_reported",
    "expand_hostlist",
    "find_free_port",
    "first_failure",
    "follow",
    "get_job_status",
    "get_node_address",
    "order_nodes",
    "parse_topology",
    "ranks_per_node",
    "read_job_id",
    "read_ranks",
    "read_topology",
    "record_end",
    "render_sbatch",
    "request_stop",
    "stop_run",
    "submit_script",
    "write_job_id",
    "write_ranks",
]
