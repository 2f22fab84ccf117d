"""Stop a run that another process launched, from what its folder says about who runs it."""

import os
import signal

from danlu.scheduler.rank_map import read_job_id
from danlu.scheduler.slurm import cancel_job, get_job_status, request_stop
from danlu.spec import RunFolder
from danlu.storage import run_lock
from danlu.storage.run_lock import LockHolder, RunError


def stop_run(run: RunFolder, holder: LockHolder, *, now: bool = False) -> None:
    """Ask the process that runs a run to stop it after its step; `now` kills it. Returns before it has ended."""
    if holder.job is not None:
        (cancel_job if now else request_stop)(holder.job)
    elif holder is run_lock.UNKNOWN_HOLDER:
        raise RunError(f"{run.path} is running, but its launcher could not record itself in the run folder")
    elif not holder.is_local:
        raise RunError(f"{run.path} runs on another host ({holder}): on it, danlu stop {run.path.absolute()}")
    else:
        _signal_launcher(run, holder, now)


def _signal_launcher(run: RunFolder, holder: LockHolder, now: bool) -> None:
    """Signal the launcher through a pidfd, which cannot refer to another process that reuses the pid."""
    try:
        process = os.pidfd_open(holder.pid)
    except ProcessLookupError:
        return  # already exited; its ranks notice
    try:
        if not holder.is_alive:
            return
        signal.pidfd_send_signal(process, signal.SIGTERM)
        if now:  # the launcher's second signal; a different one, because two equal pending signals may merge
            signal.pidfd_send_signal(process, signal.SIGINT)
    except PermissionError:
        raise RunError(f"{run.path} belongs to {holder.user}, and only that user may stop it ({holder})") from None
    except ProcessLookupError:
        return
    finally:
        os.close(process)


def cancel_pending_job(run: RunFolder) -> int | None:
    """Cancel the job of a run that has not started yet, and so holds no lock; None if there is no such job."""
    job = read_job_id(run.path)
    if job is None or get_job_status(job).is_finished:
        return None
    cancel_job(job)
    return job
