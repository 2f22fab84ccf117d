"""The ranks of a run as a job of Slurm: submit it, follow it until it ends, stop it."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from danlu.scheduler.launcher import EXIT_STOPPED, LaunchProgress, LaunchResult
from danlu.scheduler.rank_failure import describe_reported, first_failure
from danlu.scheduler.rank_map import write_job_id
from danlu.scheduler.sbatch_script import SlurmJob, render_sbatch
from danlu.scheduler.slurm import JobStatus, SlurmError, cancel_job, get_job_status, request_stop, submit_script
from danlu.spec import EndEvent, RunFolder
from danlu.storage.run_lock import RunLock

_POLL_SECONDS = 0.5
_STATUS_POLL_SECONDS = 3.0
"""Seconds between two queries to the controller."""
_STATUS_TIMEOUT = 900.0
"""Seconds without an answer before giving up on the controller, which restarts in minutes."""
_LAST_LINES = 8


class SlurmLauncher:
    """A `Launcher` of one job; on exit of the context the job goes on without this process.

    The controller is queried regularly, and may be down for a while.
    """

    def __init__(
        self,
        run: RunFolder,
        job: SlurmJob,
        lock: RunLock | None = None,
        get_status: Callable[[int], JobStatus] = get_job_status,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.run, self.job = run, job
        self.stop_requested = False
        self.job_id = 0
        """Of the submitted job."""
        self._lock, self._get_status, self._clock, self._sleep = lock, get_status, clock, sleep
        self._started_at = time.time()
        self._status: JobStatus | None = None
        self._notice = ""
        self._last_answer = self._next_query = clock()

    def __enter__(self) -> Self:
        """Submit the script, which is kept in the run folder.

        The lock is released just before, because the job acquires it.
        """
        self.run.logs.mkdir(exist_ok=True)
        script = self.run.path / "job.sbatch"
        script.write_text(render_sbatch(self.job))
        if self._lock is not None:
            self._lock.release()
        self.job_id = submit_script(script)
        write_job_id(self.run.path, self.job_id)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def poll(self) -> LaunchProgress:
        """Query the job's state if it is time to; its changes are notices."""
        if self._clock() < self._next_query:
            return LaunchProgress(is_running=True)
        self._next_query = self._clock() + _STATUS_POLL_SECONDS
        try:
            status = self._get_status(self.job_id)
        except SlurmError as error:
            if "Invalid job id" in str(error) or self._clock() - self._last_answer > _STATUS_TIMEOUT:
                raise
            return self._progress(f"no answer about job {self.job_id}, retrying: {error}", is_running=True)
        self._last_answer, self._status = self._clock(), status
        restarts = f", restart {status.restarts}" if status.restarts else ""
        reason = f" ({status.reason})" if status.reason != "None" else ""
        notice = f"job {self.job_id}: {status.state.lower()}{reason}{restarts}"
        return self._progress(notice, is_running=not status.is_finished)

    def wait(self) -> None:
        """Return when it is time for the next `poll`."""
        self._sleep(_POLL_SECONDS)

    def _progress(self, notice: str, *, is_running: bool) -> LaunchProgress:
        notices = () if notice == self._notice else (notice,)
        self._notice = notice
        return LaunchProgress(is_running, notices=notices)

    def stop(self, *, now: bool = False) -> None:
        """Stop the ranks after their step, with a checkpoint; `now` cancels the job."""
        self.stop_requested = True
        (cancel_job if now else request_stop)(self.job_id)

    def result(self) -> LaunchResult:
        """How the job ended, with the last lines of its log, where srun names the failed tasks."""
        assert self._status is not None, "a job has a result once `poll` saw its end"
        code = self._status.shell_exit_code
        if not code or (code == EXIT_STOPPED and self._was_stopped()):
            return LaunchResult(code)
        outcome = f"job {self.job_id} ended as {self._status.state} with exit code {code}"
        failure = first_failure(self.run, since=self._started_at)
        log = self.run.logs / "job.log"
        tail = log.read_text(errors="replace").splitlines()[-_LAST_LINES:] if log.exists() else []
        message = f"{describe_reported(failure)}; {outcome}" if failure else outcome
        return LaunchResult(code, message, self.run.logs, tuple(tail))

    def _was_stopped(self) -> bool:
        *_, end = (None, *self.run.read_events())
        return isinstance(end, EndEvent) and end.outcome == "stopped"
