"""`danlu stop`: stop a run from another terminal, after its current step and with a checkpoint."""

import os
import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from danlu import scheduler
from danlu.cli.prepare import DEFAULT_RUNS_DIR
from danlu.report.run_history import read_run_history
from danlu.report.run_tables import find_run
from danlu.report.terminal import Console
from danlu.scheduler import SlurmError
from danlu.spec import RunFolder
from danlu.storage import run_lock
from danlu.storage.run_lock import LockHolder, RunError

_POLL_SECONDS = 0.1


def stop(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, or the path of its folder.")],
    now: Annotated[bool, typer.Option("--now", help="Kill it at once, without a checkpoint of this step.")] = False,
    folder: Annotated[Path, typer.Option(help="Folder of the runs.")] = DEFAULT_RUNS_DIR,
) -> None:
    """Stop a run after its current step, save a checkpoint, and wait until it has ended.

    Ctrl-C ends the waiting, not the stop.
    """
    found = find_run(run, folder)
    try:
        holder = run_lock.read_holder(found)
        if holder is None:
            _cancel_pending_job(found)
            return
        _request_stop(found, holder, now)
    except SlurmError as error:
        raise RunError(str(error)) from None
    action = "ending" if now else "stopping after its current step"
    with Console(stderr=True).status(f"{found.name} ({holder}) is {action} …"):
        while run_lock.read_holder(found) is not None:
            time.sleep(_POLL_SECONDS)
    history = read_run_history(found)
    saved = f"the newest checkpoint is of step {max(history.saves):,}" if history.saves else "no checkpoint was saved"
    typer.echo(f"{found.name} {history.state} at step {history.step:,}; {saved}")


def _request_stop(run: RunFolder, holder: LockHolder, now: bool) -> None:
    if holder.job is not None:
        (scheduler.cancel_job if now else scheduler.request_stop)(holder.job)
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


def _cancel_pending_job(run: RunFolder) -> None:
    """A job that has not started yet holds no lock."""
    job = scheduler.read_job_id(run.path)
    if job is None or scheduler.get_job_status(job).is_finished:
        raise RunError(f"{run.path} is not running: {read_run_history(run).state}")
    scheduler.cancel_job(job)
    typer.echo(f"job {job} of {run.name} had not started; it is canceled")
