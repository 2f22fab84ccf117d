"""The batch script of a run: a frozen description in, text out."""

import re
import shlex
from pathlib import Path

from pydantic import field_validator

from danlu.spec.description import Count, Description, Many
from danlu.spec.run import RunFolder

_OWNED = {
    "--nodes": "--nodes",
    "-N": "--nodes",
    "--ntasks": "--nodes and --ranks-per-node",
    "-n": "--nodes and --ranks-per-node",
    "--ntasks-per-node": "--ranks-per-node",
    "--partition": "--partition",
    "-p": "--partition",
    "--account": "--account",
    "-A": "--account",
    "--time": "--time",
    "-t": "--time",
    "--job-name": "--name",
    "-J": "--name",
}
"""Options of sbatch that `danlu launch` sets itself, and where the user sets them."""


class SlurmJob(Description):
    """Everything the batch script says."""

    name: str
    folder: str
    """Where `danlu launch` was called; relative paths keep their meaning there."""
    run: str
    """The run folder, absolute, on a file system that every node sees."""
    python: str
    """The Python that ran `danlu launch`."""
    nodes: Count
    tasks_per_node: Count
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    extra: Many[str] = ()
    """Further options of sbatch, one a line, passed through as they are."""

    @field_validator("extra")
    @classmethod
    def _usable(cls, extra: tuple[str, ...]) -> tuple[str, ...]:
        for option in extra:
            check_option(option)
        return extra

    @property
    def world(self) -> int:
        """Ranks of the whole job."""
        return self.nodes * self.tasks_per_node


def check_option(option: str) -> None:
    """Say with a `ValueError` why a line cannot be passed through to sbatch."""
    if not option.startswith("-") or "\n" in option:
        raise ValueError(f'an option of sbatch must be like "--constraint=x", but is "{option}" instead')
    name = re.split(r"[=\s]", option, maxsplit=1)[0]
    if name in _OWNED:
        raise ValueError(f"sbatch's {name} must be given as danlu's own {_OWNED[name]}, but is passed through instead")


def render(job: SlurmJob) -> str:
    """Write the batch script; it needs no variable but those Slurm sets, and may be run again after a requeue."""
    python, run = shlex.quote(job.python), shlex.quote(job.run)
    # One file a node for what is said before a task has become a rank. Slurm writes it on the node itself;
    # without a pattern every node would hold a connection to srun.
    output = shlex.quote(_log(job, "node-%N.log"))
    # From 22.05 on srun no longer inherits the job's --cpus-per-task: it is repeated when it was given.
    srun = [
        "srun --mpi=none --kill-on-bad-exit=1",
        f"--output={output} --open-mode=append",
        f"--nodes={job.nodes} --ntasks={job.world} --ntasks-per-node={job.tasks_per_node}",
        "${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}",
        f"{python} -m danlu slurm-task {run} || code=$?",
    ]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _options(job)),
        "set -euo pipefail",
        f"cd {shlex.quote(job.folder)}",
        "# Once, here on the batch host: which node holds which ranks, and where they meet.",
        f"{python} -m danlu slurm-ranks {run}",
        "code=0",
        " \\\n    ".join(srun),
        f'[ "$code" -eq 0 ] || {python} -m danlu slurm-failed {run} "$code"',
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _options(job: SlurmJob) -> list[str]:
    options = [
        f"--job-name={job_name(job.name)}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.tasks_per_node}",
        f"--output={shlex.quote(_log(job, 'job.log'))}",
        "--open-mode=append",
        "--requeue",
    ]
    for name in ("time", "partition", "account"):
        if value := getattr(job, name):
            options.append(f"--{name}={shlex.quote(value)}")
    return options + list(job.extra)


def _log(job: SlurmJob, name: str) -> str:
    """A file in the run's folder of logs; a % in the folder's own path must not start one of Slurm's patterns."""
    return str(RunFolder(Path(job.run)).logs).replace("%", "%%") + "/" + name


def job_name(run: str) -> str:
    """A run's name as Slurm shows it: what would confuse its line-wise output becomes a dash."""
    return re.sub(r"[^\w.-]", "-", run)
