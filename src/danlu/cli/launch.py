"""`danlu launch`: submit a run to the cluster's scheduler."""

from pathlib import Path
from typing import Annotated

import typer

from danlu import scheduler
from danlu.cli.ckpt_ref import fail
from danlu.cli.custom_model import check_custom_model
from danlu.cli.precision_warning import warn_slow_precision
from danlu.cli.prepare import choose_new_run_folder, prepare_locked_run
from danlu.cli.recipe_paths import resolve_recipe_paths
from danlu.cli.slurm_submit import (
    AccountOption,
    PartitionOption,
    RanksPerNodeOption,
    ResourceRequest,
    SbatchOption,
    TimeLimitOption,
    WaitOption,
    resolve_ranks_per_node,
    submit_run,
)
from danlu.scheduler import SlurmError
from danlu.spec import RunFolder
from danlu.spec.check import load_run_spec
from danlu.spec.plan import fully_sharded_plan
from danlu.spec.problem import suggest_name

_SCHEDULERS = ["slurm"]


def _check_scheduler(name: str) -> str:
    if name not in _SCHEDULERS:
        raise typer.BadParameter(f'"{name}" is not a scheduler Danlu knows; {suggest_name(name, _SCHEDULERS)}')
    return name


def launch(
    recipe: Annotated[Path, typer.Argument(help="What to train.", metavar="RECIPE.toml")],
    on: Annotated[str, typer.Option(help="The scheduler: slurm.", callback=_check_scheduler)],
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")],
    ranks_per_node: RanksPerNodeOption = None,
    plan: Annotated[Path | None, typer.Option(help="Parallel layout; default: FSDP over all ranks.")] = None,
    cluster: Annotated[str | None, typer.Option(help="A cluster of the catalog, or its file.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; default: the recipe's.")] = None,
    partition: PartitionOption = None,
    account: AccountOption = None,
    time: TimeLimitOption = None,
    sbatch: SbatchOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script; write and submit nothing.")] = False,
    wait: WaitOption = False,
) -> None:
    """Start a run on a cluster, through its scheduler, with ranks in the order of its network."""
    ranks = resolve_ranks_per_node(nodes, ranks_per_node, plan, cluster)
    try:
        if not dry_run:
            scheduler.check_slurm_installed()
        request = ResourceRequest(nodes, ranks, time, partition, account, tuple(sbatch or ()))
        if dry_run:
            run = _check_inputs(recipe, plan, cluster, name, nodes * ranks)
            typer.echo(scheduler.render_sbatch(request.to_job(run)), nl=False)
        else:
            run, lock = prepare_locked_run(recipe, plan, cluster, name, nodes * ranks)
            raise typer.Exit(submit_run(request.to_job(run), run, wait, lock, fresh=True))
    except SlurmError as error:
        fail(str(error))


def _check_inputs(recipe: Path, plan: Path | None, cluster: str | None, name: str | None, world: int) -> RunFolder:
    """The folder that `prepare_locked_run` would write, after the same checks."""
    checked = load_run_spec(recipe, plan, cluster, default=fully_sharded_plan(world))
    warn_slow_precision(checked)
    check_custom_model(resolve_recipe_paths(checked.recipe, recipe.parent), recipe, checked.plan, plan)
    return choose_new_run_folder(name, checked.recipe.name)
