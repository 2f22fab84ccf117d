"""`danlu resume`: resume a run on any layout, and verify that nothing was lost."""

from pathlib import Path
from typing import Annotated

import typer

from danlu import scheduler
from danlu.cli.ckpt_ref import fail, report_errors
from danlu.cli.run_options import (
    AccountOption,
    ClusterOption,
    PartitionOption,
    RanksPerNodeOption,
    ResourceRequest,
    RunArgument,
    RunsDirOption,
    SbatchOption,
    SparesOption,
    TimeLimitOption,
    WaitOption,
)
from danlu.cli.slurm_submit import resolve_ranks_per_node, submit_run
from danlu.cli.train import train_again
from danlu.report.run_tables import find_run
from danlu.runs.prepare import prepare_resume
from danlu.scheduler import SlurmError
from danlu.scheduler.rank_map import read_ranks
from danlu.spec import RunFolder
from danlu.spec.run_folder import DEFAULT_RUNS_DIR
from danlu.storage import run_lock
from danlu.storage.checkpoint.checkpoint_dir import CheckpointDir
from danlu.storage.checkpoint.run_store import open_run_store


def resume(
    run: RunArgument,
    nproc: Annotated[int | None, typer.Option(min=1, help="Number of processes; default: as before.")] = None,
    plan: Annotated[Path | None, typer.Option(help="Parallel layout; default: as before.")] = None,
    cluster: ClusterOption = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Resume through Slurm, on so many nodes.")] = None,
    ranks_per_node: RanksPerNodeOption = None,
    spares: SparesOption = None,
    partition: PartitionOption = None,
    account: AccountOption = None,
    time: TimeLimitOption = None,
    sbatch: SbatchOption = None,
    wait: WaitOption = False,
    folder: RunsDirOption = DEFAULT_RUNS_DIR,
) -> None:
    """Resume a run from its newest checkpoint, on the same or another layout.

    Prints the verification: which layout wrote the checkpoint and which reads it, how many tensors are equal by
    fingerprint, and how many samples are repeated or skipped.
    """
    requested = find_run(run, folder)
    with run_lock.acquire(requested):  # before the store is queried, which may take long; again before writing
        pass
    _check_has_checkpoint(requested)
    if nodes is None:
        train_again(*prepare_resume(run, nproc, plan, cluster, folder))
    if plan is None and ranks_per_node is None:
        ranks_per_node = _ranks_per_node_before(requested)
    own = str(requested.cluster) if requested.cluster.exists() else None
    ranks = resolve_ranks_per_node(nodes, ranks_per_node, plan, cluster or own)
    try:
        scheduler.check_slurm_installed()
        found, lock = prepare_resume(run, nodes * ranks, plan, cluster, folder)
        job = ResourceRequest(nodes, ranks, time, partition, account, tuple(sbatch or ()), spares).to_job(found)
        raise typer.Exit(submit_run(job, found, wait, lock, fresh=False))
    except SlurmError as error:
        fail(str(error))


def _ranks_per_node_before(run: RunFolder) -> int | None:
    """As many as when it ran on nodes last, if it did."""
    try:
        return read_ranks(run.path).tasks_per_node
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        fail(str(error))


def _check_has_checkpoint(run: RunFolder) -> None:
    """Without a checkpoint the run would start over, which is not what was requested."""
    with report_errors():
        checkpoint_dir = CheckpointDir(open_run_store(run), keep=1)
        if checkpoint_dir.resumable_steps():
            return
        quarantined = [f"step {step} is quarantined" for step in checkpoint_dir.quarantined_steps()]
    reason = "; ".join(quarantined) or "none was saved"
    typer.echo(
        f"{run.name} has no checkpoint to resume from: {reason}\n"
        f"    → `danlu ckpt ls {run.name}` lists them; `danlu train --resume {run.name}` starts at step 0",
        err=True,
    )
    raise typer.Exit(2)
