"""Slurm's own commands: submit, look, cancel, and the two questions a job asks about itself."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from shutil import which

from danlu.scheduler.topology import Switch, parse_topology
from danlu.spec.description import Description

Run = Callable[[list[str]], "subprocess.CompletedProcess[str]"]
"""Runs a command and returns what it said; a test may put its own in its place."""

_TIMEOUT = 120.0
"""Seconds for one answer: a controller under load takes a minute, not two."""


class SlurmError(Exception):
    """Slurm refused or did not answer; the text is its own."""


class JobStatus(Description):
    """A job as the controller sees it."""

    job: int
    state: str
    """Slurm's word: PENDING, RUNNING, COMPLETED, FAILED, …"""
    reason: str
    exit_code: int
    signal: int
    restarts: int

    @property
    def over(self) -> bool:
        """True when the job will not run again by itself."""
        return self.state in _OVER

    @property
    def outcome(self) -> int:
        """What the job's exit means for a shell: 0 only for a job that completed."""
        if self.state == "COMPLETED":
            return 0
        return self.exit_code or (128 + self.signal if self.signal else 1)


_OVER = frozenset(
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
        raise _not_found(command[0]) from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"`{' '.join(command)}` gave no answer in {_TIMEOUT:.0f} s: is slurmctld up?") from None


def check_installed() -> None:
    """Raise `SlurmError` on a machine that cannot submit jobs, before anything has been written."""
    if which("sbatch") is None:
        raise _not_found("sbatch")


def _not_found(command: str) -> SlurmError:
    return SlurmError(
        f"`{command}` is not found: --on slurm is for a machine with Slurm's commands, such as a login node"
    )


def submit(script: Path, run: Run = run_command) -> int:
    """Hand a batch script to Slurm and return the job's number."""
    answer = _answer(["sbatch", "--parsable", str(script)], run)
    number = answer.strip().splitlines()[-1].split(";")[0] if answer.strip() else ""
    if not number.isdigit():
        raise SlurmError(f"sbatch must answer with a job number, but said {answer.strip()!r}")
    return int(number)


def status(job: int, run: Run = run_command) -> JobStatus:
    """Ask the controller about one job; it remembers a job for MinJobAge (five minutes by default) after its end."""
    return parse_status(_answer(["scontrol", "--oneliner", "show", "job", str(job)], run))


def cancel(job: int, run: Run = run_command) -> None:
    """End a job, wherever it is."""
    _answer(["scancel", str(job)], run)


def topology(run: Run = run_command) -> tuple[Switch, ...]:
    """The switches Slurm knows; empty when it has no topology."""
    return parse_topology(_answer(["scontrol", "show", "topology"], run))


def node_address(node: str, run: Run = run_command) -> str:
    """The address Slurm itself reaches a node by."""
    return _field("NodeAddr", _answer(["scontrol", "--oneliner", "show", "node", node], run))


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
        raise SlurmError(f"scontrol must say {name}=…, but said {line.strip()!r}")
    return match[1]


def _answer(command: list[str], run: Run) -> str:
    done = run(command)
    if done.returncode:
        words = (done.stderr + done.stdout).strip() or f"exit code {done.returncode} and not a word"
        raise SlurmError(f"`{' '.join(command)}` failed:\n{words}")
    return done.stdout
