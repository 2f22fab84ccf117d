"""`danlu resume`: go on with a run on any layout, with proof that nothing was lost on the way."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from danlu import scheduler
from danlu.cli.ckpt_place import fail, told_plainly
from danlu.cli.prepare import RUNS
from danlu.cli.submit import Account, Partition, RanksPerNode, Request, Sbatch, Time, Wait, fitting_ranks, submit
from danlu.cli.train import resumed_run, train_run
from danlu.report.runs import find_run
from danlu.scheduler import SlurmError
from danlu.spec import RunFolder, load_plan
from danlu.storage.checkpoint.home import open_home
from danlu.storage.checkpoint.shelf import Shelf


def resume(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, or the path of its folder.")],
    nproc: Annotated[int | None, typer.Option(min=1, help="Processes; as many as before if left out.")] = None,
    plan: Annotated[Path | None, typer.Option(help="How it goes on; as before if left out.")] = None,
    cluster: Annotated[str | None, typer.Option(help="A cluster of the catalogue, or its file.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Go on through Slurm, on so many nodes.")] = None,
    ranks_per_node: RanksPerNode = None,
    partition: Partition = None,
    account: Account = None,
    time: Time = None,
    sbatch: Sbatch = None,
    wait: Wait = False,
    folder: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = RUNS,
) -> None:
    """Go on with a run from its newest checkpoint, on the same or another layout.

    Prints the proof: which layout wrote the checkpoint and which reads it, how many tensors are equal by fingerprint,
    and how many samples are repeated or skipped.
    """
    _refuse_without_checkpoint(find_run(run, folder))
    request = {"ranks-per-node": ranks_per_node, "partition": partition, "account": account, "time": time}
    if nodes is None:
        for option, value in {**request, "sbatch": sbatch, "wait": wait}.items():
            if value:
                raise typer.BadParameter("is for a resume through Slurm; give --nodes too", param_hint=f"--{option}")
        found = resumed_run(run, nproc, plan, cluster, folder)
        raise typer.Exit(train_run(found, load_plan(found.plan).degrees.world, Console(highlight=False)))
    if nproc is not None:
        raise typer.BadParameter("is for this machine; with --nodes give --ranks-per-node", param_hint="--nproc")
    ranks = fitting_ranks(nodes, ranks_per_node, plan, cluster)
    try:
        scheduler.check_installed()
        found = resumed_run(run, nodes * ranks, plan, cluster, folder)
        job = Request(nodes, ranks, time, partition, account, tuple(sbatch or ())).job(found)
        raise typer.Exit(submit(job, found, wait, fresh=False))
    except SlurmError as error:
        fail(str(error))


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
