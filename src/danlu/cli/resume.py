"""`danlu resume`: go on with a run on any layout, with proof that nothing was lost on the way."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from danlu.cli.ckpt_place import told_plainly
from danlu.cli.prepare import RUNS
from danlu.cli.train import resumed_run, train_run
from danlu.report.runs import find_run
from danlu.spec import RunFolder, load_plan
from danlu.storage.checkpoint.home import open_home
from danlu.storage.checkpoint.shelf import Shelf


def resume(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, or the path of its folder.")],
    nproc: Annotated[int | None, typer.Option(min=1, help="Processes; as many as before if left out.")] = None,
    plan: Annotated[Path | None, typer.Option(help="How it goes on; as before if left out.")] = None,
    cluster: Annotated[str | None, typer.Option(help="A cluster of the catalogue, or its file.")] = None,
    folder: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = RUNS,
) -> None:
    """Go on with a run from its newest checkpoint, on the same or another layout.

    Prints the proof: which layout wrote the checkpoint and which reads it, how many tensors are equal by fingerprint,
    and how many samples are repeated or skipped.
    """
    _refuse_without_checkpoint(find_run(run, folder))
    found = resumed_run(run, nproc, plan, cluster, folder)
    raise typer.Exit(train_run(found, load_plan(found.plan).degrees.world, Console(highlight=False)))


def _refuse_without_checkpoint(run: RunFolder) -> None:
    """Without a checkpoint a run would start anew, which is not what was asked for."""
    with told_plainly():
        shelf = Shelf(open_home(run), keep=1)
        if shelf.steps():
            return
        there = [f"step {step} is set aside" for step in shelf.quarantined()]
    words = "; ".join(there) or "none was saved"
    typer.echo(
        f"{run.name} has no checkpoint to go on from: {words}\n"
        f"    → `danlu ckpt ls {run.name}` shows what there is; `danlu train --resume {run.name}` starts at step 0",
        err=True,
    )
    raise typer.Exit(2)
