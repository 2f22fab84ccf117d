"""`danlu stop`: stop a run from another terminal, after its current step and with a checkpoint."""

import time
from typing import Annotated

import typer

from danlu import scheduler
from danlu.cli.run_options import RunArgument, RunsDirOption
from danlu.report.run_history import read_run_history
from danlu.report.run_tables import find_run
from danlu.report.terminal import Console
from danlu.scheduler import SlurmError
from danlu.spec.run_folder import DEFAULT_RUNS_DIR
from danlu.storage import run_lock
from danlu.storage.run_lock import RunError

_POLL_SECONDS = 0.1


def stop(
    run: RunArgument,
    now: Annotated[bool, typer.Option("--now", help="Kill it at once, without a checkpoint of this step.")] = False,
    folder: RunsDirOption = DEFAULT_RUNS_DIR,
) -> None:
    """Stop a run after its current step, save a checkpoint, and wait until it has ended.

    Ctrl-C ends the waiting, not the stop.
    """
    found = find_run(run, folder)
    try:
        holder = run_lock.read_holder(found)
        if holder is None:
            if (job := scheduler.cancel_pending_job(found)) is None:
                raise RunError(f"{found.path} is not running: {read_run_history(found).state}")
            typer.echo(f"job {job} of {found.name} had not started; it is canceled")
            return
        scheduler.stop_run(found, holder, now=now)
    except SlurmError as error:
        raise RunError(str(error)) from None
    action = "ending" if now else "stopping after its current step"
    with Console(stderr=True).status(f"{found.name} ({holder}) is {action} …"):
        while run_lock.read_holder(found) is not None:
            time.sleep(_POLL_SECONDS)
    history = read_run_history(found)
    saved = f"the newest checkpoint is of step {max(history.saves):,}" if history.saves else "no checkpoint was saved"
    typer.echo(f"{found.name} {history.state} at step {history.step:,}; {saved}")
