"""`danlu launch`: submit a run to the cluster's scheduler."""

from typing import Annotated

import typer

from danlu import scheduler
from danlu.cli.ckpt_ref import fail
from danlu.cli.run_options import (
    AccountOption,
    ClusterOption,
    NameOption,
    PartitionOption,
    PlanOption,
    RanksPerNodeOption,
    RecipeArgument,
    ResourceRequest,
    SbatchOption,
    SparesOption,
    TimeLimitOption,
    WaitOption,
)
from danlu.cli.slurm_submit import resolve_ranks_per_node, submit_run
from danlu.runs.prepare import check_run, choose_new_run_folder, prepare_run
from danlu.scheduler import SlurmError
from danlu.spec.problem import suggest_name

_SCHEDULERS = ["slurm"]


def _check_scheduler(name: str) -> str:
    if name not in _SCHEDULERS:
        raise typer.BadParameter(f'"{name}" is not a scheduler Danlu knows; {suggest_name(name, _SCHEDULERS)}')
    return name


def launch(
    recipe: RecipeArgument,
    on: Annotated[str, typer.Option(help="The scheduler: slurm.", callback=_check_scheduler)],
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")],
    ranks_per_node: RanksPerNodeOption = None,
    spares: SparesOption = None,
    plan: PlanOption = None,
    cluster: ClusterOption = None,
    name: NameOption = None,
    partition: PartitionOption = None,
    account: AccountOption = None,
    time: TimeLimitOption = None,
    sbatch: SbatchOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script; write and submit nothing.")] = False,
    wait: WaitOption = False,
) -> None:
    """Start a run on a cluster, through its scheduler, with ranks in the order of its network."""
    ranks = resolve_ranks_per_node(nodes, ranks_per_node, plan, cluster)
    request = ResourceRequest(nodes, ranks, time, partition, account, tuple(sbatch or ()), spares)
    if dry_run:
        spec = check_run(recipe, plan, cluster, nodes * ranks)
        run = choose_new_run_folder(name, spec.recipe.name)
        typer.echo(scheduler.render_sbatch(request.to_job(run)), nl=False)
        return
    try:
        scheduler.check_slurm_installed()
        run, lock = prepare_run(recipe, plan, cluster, name, nodes * ranks)
        raise typer.Exit(submit_run(request.to_job(run), run, wait, lock, fresh=True))
    except SlurmError as error:
        fail(str(error))
