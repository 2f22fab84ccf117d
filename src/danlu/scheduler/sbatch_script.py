"""The batch script of a run, rendered from a frozen description."""

import re
import shlex
from pathlib import Path

from pydantic import field_validator

from danlu.spec.description import PositiveInt, SpecModel, TupleOf
from danlu.spec.run_folder import RunFolder

_RESERVED_OPTIONS = {
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


COORDINATORS = 20
"""Coordinators of one start of a job: as many as this are not killed by chance."""


class SlurmJob(SpecModel):
    """Contents of the batch script."""

    name: str
    workdir: str
    """Where `danlu launch` was called; relative paths keep their meaning there."""
    run_folder: str
    """The run folder, absolute, on a file system that every node sees."""
    python: str
    """The Python that ran `danlu launch`."""
    nodes: PositiveInt
    tasks_per_node: PositiveInt
    spares: int | None = None
    """Nodes beside these that wait to take the place of one that is lost; None if a lost node ends the job."""
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    extra_options: TupleOf[str] = ()
    """Further options of sbatch, one per line, passed through unchanged."""

    @field_validator("extra_options")
    @classmethod
    def _check_extra_options(cls, extra: tuple[str, ...]) -> tuple[str, ...]:
        for option in extra:
            check_sbatch_option(option)
        return extra

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.nodes * self.tasks_per_node


def check_sbatch_option(option: str) -> None:
    """Raise `ValueError` if a line cannot be passed through to sbatch."""
    if not option.startswith("-") or "\n" in option:
        raise ValueError(f'an option of sbatch must be like "--constraint=x", but is "{option}" instead')
    name = re.split(r"[=\s]", option, maxsplit=1)[0]
    if name in _RESERVED_OPTIONS:
        raise ValueError(
            f"sbatch's {name} must be given as danlu's own {_RESERVED_OPTIONS[name]}, but is passed through instead"
        )


def render_sbatch(job: SlurmJob) -> str:
    """Render the batch script; it needs only the variables that Slurm sets, and may run again after a requeue."""
    python, run = shlex.quote(job.python), shlex.quote(job.run_folder)
    # One file per node for output from before a task has become a rank. Slurm writes it on the node itself;
    # without a pattern every node would hold a connection to srun.
    output = shlex.quote(_log_path(job, "node-%N.log"))
    if job.spares is not None:
        return _render_with_agents(job, python, run, output)
    # From 22.05 on srun no longer inherits the job's --cpus-per-task: it is repeated when it was given.
    srun = [
        "srun --mpi=none --kill-on-bad-exit=1",
        f"--output={output} --open-mode=append",
        f"--nodes={job.nodes} --ntasks={job.world_size} --ntasks-per-node={job.tasks_per_node}",
        "${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}",
        f"{python} -m danlu slurm-task {run} || code=$?",
    ]
    return _script(job, f"{python} -m danlu slurm-ranks {run} --lock 9", " \\\n    ".join(srun))


def _render_with_agents(job: SlurmJob, python: str, run: str, output: str) -> str:
    """The same with an agent on every node and a coordinator here: a node that is lost does not end the job."""
    nodes = job.nodes + (job.spares or 0)
    srun = [
        "srun --mpi=none --no-kill --kill-on-bad-exit=0 --cpu-bind=none",
        f"--output={output} --open-mode=append",
        f"--nodes={nodes} --ntasks={nodes} --ntasks-per-node=1",
        f"{python} -m danlu slurm-agent {run} 9>&- &",
    ]
    return _script(
        job,
        f"{python} -m danlu slurm-ranks {run} --lock 9 --spares {job.spares}",
        " \\\n    ".join(srun),
        "# Ranks and agents outlive a coordinator that is killed: the next one takes over from its file.",
        f"for attempt in $(seq {COORDINATORS}); do",
        "    code=0",
        f"    {python} -m danlu slurm-coordinate {run} || code=$?",
        '    if [ "$code" -lt 128 ]; then break; fi',
        "done",
        "# Agents have been told to leave; a node that is lost would be waited for.",
        "kill %1 2>/dev/null || :",
        "wait || :",
        "# One after the other was killed, and the agents have ended their ranks: start again, from the checkpoint.",
        'if [ "$code" -ge 128 ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
    )


def _script(job: SlurmJob, assign: str, *body: str) -> str:
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _sbatch_directives(job)),
        "set -euo pipefail",
        f"cd {shlex.quote(job.workdir)}",
        "# This shell holds the run's lock until it exits; when the job is canceled it waits for its tasks.",
        "trap : TERM",
        f"exec 9<>{shlex.quote(str(Path(job.run_folder) / '.lock'))}",
        "# Once, on the batch host: the ranks of each node, and the rendezvous endpoint.",
        assign,
        "code=0",
        *body,
        f'{shlex.quote(job.python)} -m danlu slurm-ended {shlex.quote(job.run_folder)} "$code"',
    ]
    return "\n".join(lines) + "\n"


def _sbatch_directives(job: SlurmJob) -> list[str]:
    options = [
        f"--job-name={sanitize_job_name(job.name)}",
        f"--nodes={job.nodes + (job.spares or 0)}",
        f"--ntasks-per-node={job.tasks_per_node}",
        f"--output={shlex.quote(_log_path(job, 'job.log'))}",
        "--open-mode=append",
        "--requeue",
        *(["--no-kill"] if job.spares is not None else []),
    ]
    for name in ("time", "partition", "account"):
        if value := getattr(job, name):
            options.append(f"--{name}={shlex.quote(value)}")
    return options + list(job.extra_options)


def _log_path(job: SlurmJob, name: str) -> str:
    """A file in the run's log folder; a % in the folder's own path must not start one of Slurm's patterns."""
    return str(RunFolder(Path(job.run_folder)).logs).replace("%", "%%") + "/" + name


def sanitize_job_name(run: str) -> str:
    """A run's name as Slurm shows it: characters that would break its line-wise output become dashes."""
    return re.sub(r"[^\w.-]", "-", run)
