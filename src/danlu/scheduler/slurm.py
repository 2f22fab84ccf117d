"""Slurm's commands: submit, query and cancel a job; the topology and a node's address for a running job."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from shutil import which

from danlu.scheduler.topology import Switch, parse_topology
from danlu.spec.description import SpecModel

CommandRunner = Callable[[list[str]], "subprocess.CompletedProcess[str]"]
"""Runs a command and returns its output; tests pass a fake."""

_TIMEOUT = 120.0
"""Seconds for one answer: a controller under load takes a minute, not two."""


class SlurmError(Exception):
    """Slurm refused or did not answer; the text is Slurm's."""


class SubmissionUncertainError(SlurmError):
    """Slurm did not answer in time: it may have queued the job nevertheless."""


class JobStatus(SpecModel):
    """A job as the controller sees it."""

    job: int
    state: str
    """Slurm's state: PENDING, RUNNING, COMPLETED, FAILED, …"""
    reason: str
    exit_code: int
    signal: int
    restarts: int

    @property
    def is_finished(self) -> bool:
        """True when the job will not run again by itself."""
        return self.state in _TERMINAL_STATES

    @property
    def shell_exit_code(self) -> int:
        """The job's exit code for a shell: 0 only for a job that completed."""
        if self.state == "COMPLETED":
            return 0
        return self.exit_code or (128 + self.signal if self.signal else 1)


_TERMINAL_STATES = frozenset(
    (
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
        *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    )
)


def run_command(command: list[str]) -> "subprocess.CompletedProcess[str]":
    """Run one of Slurm's commands; `SlurmError` when it is not installed or does not answer."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except FileNotFoundError:
        raise _missing_command_error(command[0]) from None
    except subprocess.TimeoutExpired:
        raise SlurmError(
            f"`{' '.join(command)}` gave no answer in {_TIMEOUT:.0f} s (timed out): is slurmctld up?"
        ) from None


def check_slurm_installed() -> None:
    """Raise `SlurmError` on a machine that cannot submit jobs, before anything is written."""
    if which("sbatch") is None:
        raise _missing_command_error("sbatch")


def _missing_command_error(command: str) -> SlurmError:
    return SlurmError(
        f"`{command}` is not found: --on slurm is for a machine with Slurm's commands, such as a login node"
    )


def submit_script(script: Path, run: CommandRunner = run_command) -> int:
    """Submit a batch script and return the job's id."""
    try:
        answer = _run_checked(["sbatch", "--parsable", str(script)], run)
    except SlurmError as error:
        if "timed out" in str(error):  # also what sbatch says of its own limit: "Socket timed out on send/recv"
            raise SubmissionUncertainError(str(error)) from None
        raise
    number = answer.strip().splitlines()[-1].split(";")[0] if answer.strip() else ""
    if not number.isdigit():
        raise SlurmError(f"sbatch must print a job number, but printed {answer.strip()!r}")
    return int(number)


def get_job_status(job: int, run: CommandRunner = run_command) -> JobStatus:
    """Query the controller for one job; it keeps a job for MinJobAge (five minutes by default) after its end."""
    return parse_status(_run_checked(["scontrol", "--oneliner", "show", "job", str(job)], run))


def cancel_job(job: int, run: CommandRunner = run_command) -> None:
    """Cancel a job in any state."""
    _run_checked(["scancel", str(job)], run)


def requeue_job(job: int, run: CommandRunner = run_command) -> None:
    """Have a job started again, on other nodes if need be; also from within it."""
    _run_checked(["scontrol", "requeue", str(job)], run)


def request_stop(job: int, run: CommandRunner = run_command) -> None:
    """Send SIGTERM to a job's tasks, not to its script: ranks stop after their step and save."""
    _run_checked(["scancel", "--signal=TERM", str(job)], run)


def read_topology(run: CommandRunner = run_command) -> tuple[Switch, ...]:
    """Slurm's switches; empty when it has no topology."""
    return parse_topology(_run_checked(["scontrol", "show", "topology"], run))


def get_node_address(node: str, run: CommandRunner = run_command) -> str:
    """The address that Slurm itself uses for a node."""
    return _field("NodeAddr", _run_checked(["scontrol", "--oneliner", "show", "node", node], run))


def parse_status(line: str) -> JobStatus:
    """Read the line that `scontrol --oneliner show job` prints."""
    code, _, signal = _field("ExitCode", line).partition(":")
    return JobStatus(
        job=int(_field("JobId", line)),
        state=_field("JobState", line),
        reason=_field("Reason", line),
        exit_code=int(code),
        signal=int(signal or 0),
        restarts=int(_field("Restarts", line)),
    )


def _field(name: str, line: str) -> str:
    match = re.search(rf"(?:^|\s){name}=(\S+)", line)
    if match is None:
        raise SlurmError(f"scontrol must print {name}=…, but printed {line.strip()!r}")
    return match[1]


def _run_checked(command: list[str], run: CommandRunner) -> str:
    done = run(command)
    if done.returncode:
        output = (done.stderr + done.stdout).strip() or f"exit code {done.returncode} without output"
        raise SlurmError(f"`{' '.join(command)}` failed:\n{output}")
    return done.stdout
