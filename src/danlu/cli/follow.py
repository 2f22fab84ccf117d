"""Follow a job of a scheduler until it is over: its state, and the run's own events."""

import time
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from danlu.report import Live, summary, write_page
from danlu.scheduler import JobStatus, SlurmError
from danlu.spec import RunFolder

_ASK_EVERY = 3.0
"""Seconds between two questions to the controller."""
_LOOK_EVERY = 0.5
"""Seconds between two looks at the events."""
_PATIENCE = 900.0
"""Seconds without an answer after which the job is given up for lost: a controller restarts in minutes."""
_LAST_LINES = 8


def follow(
    job: int,
    run: RunFolder,
    live: Live,
    console: Console,
    ask: Callable[[int], JobStatus],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Show the job's state and the run's steps until the job is over; returns the exit code a shell should see."""
    watch = _Watch(job, console, ask, clock)
    with live:
        while not (status := watch.look()):
            live.update()
            sleep(_LOOK_EVERY)
    if run.events.exists():
        console.print(summary(run))
        console.print(f"page: {write_page(run)}", soft_wrap=True, markup=False)
    if status.outcome:
        _tell_failure(status, run, console)
    return status.outcome


class _Watch:
    """Asks the controller now and then, tells what has changed, and outlives a controller that is away for a while."""

    def __init__(self, job: int, console: Console, ask: Callable[[int], JobStatus], clock: Callable[[], float]) -> None:
        self.job, self.console, self.ask, self.clock = job, console, ask, clock
        self.told = ""
        self.answered = clock()
        self.next = clock()

    def look(self) -> JobStatus | None:
        """The job's last state once it is over; None before."""
        if self.clock() < self.next:
            return None
        self.next = self.clock() + _ASK_EVERY
        try:
            status = self.ask(self.job)
        except SlurmError as error:
            if "Invalid job id" in str(error) or self.clock() - self.answered > _PATIENCE:
                raise
            self._tell(f"no answer about job {self.job}, asking again: {error}", "yellow")
            return None
        self.answered = self.clock()
        restarts = f", restart {status.restarts}" if status.restarts else ""
        reason = f" ({status.reason})" if status.reason != "None" else ""
        self._tell(f"job {self.job}: {status.state.lower()}{reason}{restarts}", "dim")
        return status if status.over else None

    def _tell(self, words: str, style: str) -> None:
        if words != self.told:
            self.told = words
            self.console.print(Text(words, style=style), soft_wrap=True)


def _tell_failure(status: JobStatus, run: RunFolder, console: Console) -> None:
    """Say how the job ended and show the last lines of its own log: srun names the tasks that failed there."""
    words = f"job {status.job} ended as {status.state} with exit code {status.outcome}; what the ranks said: {run.logs}"
    console.print(Text(words, style="red"), soft_wrap=True)
    log = run.logs / "job.log"
    if log.exists():
        for line in log.read_text(errors="replace").splitlines()[-_LAST_LINES:]:
            console.print(Text(f"  {line}", style="dim"), soft_wrap=True)
