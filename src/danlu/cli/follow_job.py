"""Follow a scheduler's job until it ends: its state, and the run's events."""

import time
from collections.abc import Callable

from rich.text import Text

from danlu.report import ProgressDisplay, summary, write_run_page
from danlu.report.terminal import Console
from danlu.scheduler import JobStatus, SlurmError
from danlu.spec import RunFolder

_STATUS_POLL_SECONDS = 3.0
"""Seconds between two queries to the controller."""
_EVENT_POLL_SECONDS = 0.5
"""Seconds between two reads of the events."""
_STATUS_TIMEOUT = 900.0
"""Seconds without an answer before giving up on the controller, which restarts in minutes."""
_LAST_LINES = 8


def follow_job(
    job: int,
    run: RunFolder,
    live: ProgressDisplay,
    console: Console,
    get_status: Callable[[int], JobStatus],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Show the job's state and the run's steps until the job ends; returns the exit code for the shell."""
    poller = _JobPoller(job, console, get_status, clock)
    with live:
        while not (status := poller.poll()):
            live.update()
            sleep(_EVENT_POLL_SECONDS)
    if run.events.exists():
        console.print(summary(run))
        try:
            console.print(f"page: {write_run_page(run)}", soft_wrap=True, markup=False)
        except OSError as error:
            console.print(f"the page could not be written: {error}", soft_wrap=True, markup=False)
    stopped = live.history.end is not None and live.history.end.outcome == "stopped"
    if status.shell_exit_code and not stopped:
        _print_failure(status, run, console)
    return status.shell_exit_code


class _JobPoller:
    """Queries the controller regularly, prints changes, and tolerates a controller that is down for a while."""

    def __init__(
        self, job: int, console: Console, get_status: Callable[[int], JobStatus], clock: Callable[[], float]
    ) -> None:
        self.job, self.console, self.get_status, self.clock = job, console, get_status, clock
        self.last_line = ""
        self.last_answer = clock()
        self.next_poll = clock()

    def poll(self) -> JobStatus | None:
        """The job's final status once it has ended; None before."""
        if self.clock() < self.next_poll:
            return None
        self.next_poll = self.clock() + _STATUS_POLL_SECONDS
        try:
            status = self.get_status(self.job)
        except SlurmError as error:
            if "Invalid job id" in str(error) or self.clock() - self.last_answer > _STATUS_TIMEOUT:
                raise
            self._print_if_changed(f"no answer about job {self.job}, retrying: {error}", "yellow")
            return None
        self.last_answer = self.clock()
        restarts = f", restart {status.restarts}" if status.restarts else ""
        reason = f" ({status.reason})" if status.reason != "None" else ""
        self._print_if_changed(f"job {self.job}: {status.state.lower()}{reason}{restarts}", "dim")
        return status if status.is_finished else None

    def _print_if_changed(self, line: str, style: str) -> None:
        if line != self.last_line:
            self.last_line = line
            self.console.print(Text(line, style=style), soft_wrap=True)


def _print_failure(status: JobStatus, run: RunFolder, console: Console) -> None:
    """Print how the job ended and the last lines of its log, where srun names the failed tasks."""
    outcome = f"job {status.job} ended as {status.state} with exit code {status.shell_exit_code}"
    console.print(Text(f"{outcome}; rank logs: {run.logs}", style="red"), soft_wrap=True)
    log = run.logs / "job.log"
    if log.exists():
        for line in log.read_text(errors="replace").splitlines()[-_LAST_LINES:]:
            console.print(Text(f"  {line}", style="dim"), soft_wrap=True)
