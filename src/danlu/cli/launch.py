"""`danlu launch`: hand a run to the machine's own scheduler."""

from pathlib import Path
from typing import Annotated

import typer

from danlu import scheduler
from danlu.cli.ckpt_place import fail
from danlu.cli.own_model import check_own_model
from danlu.cli.paths import with_absolute_paths
from danlu.cli.prepare import choose_folder, prepare_run
from danlu.cli.submit import Account, Partition, RanksPerNode, Request, Sbatch, Time, Wait, fitting_ranks, submit
from danlu.scheduler import SlurmError
from danlu.spec import RunFolder
from danlu.spec.check import check_all
from danlu.spec.plan import fully_sharded
from danlu.spec.problem import nearest

_SCHEDULERS = ["slurm"]


def _known_scheduler(name: str) -> str:
    if name not in _SCHEDULERS:
        raise typer.BadParameter(f'"{name}" is not a scheduler Danlu knows; {nearest(name, _SCHEDULERS)}')
    return name


def launch(
    recipe: Annotated[Path, typer.Argument(help="What to train.", metavar="RECIPE.toml")],
    on: Annotated[str, typer.Option(help="The scheduler: slurm.", callback=_known_scheduler)],
    nodes: Annotated[int, typer.Option(min=1, help="Nodes to ask for.")],
    ranks_per_node: RanksPerNode = None,
    plan: Annotated[Path | None, typer.Option(help="How it runs; states sharded over all ranks if left out.")] = None,
    cluster: Annotated[str | None, typer.Option(help="A cluster of the catalogue, or its file.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; the recipe's if left out.")] = None,
    partition: Partition = None,
    account: Account = None,
    time: Time = None,
    sbatch: Sbatch = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script; write and submit nothing.")] = False,
    wait: Wait = False,
) -> None:
    """Start a run on a cluster, through its scheduler, with ranks in the order of its network."""
    ranks = fitting_ranks(nodes, ranks_per_node, plan, cluster)
    try:
        if not dry_run:
            scheduler.check_installed()
        prepare = _pretend_to_prepare if dry_run else prepare_run
        run = prepare(recipe, plan, cluster, name, nodes * ranks)
        job = Request(nodes, ranks, time, partition, account, tuple(sbatch or ())).job(run)
        if dry_run:
            typer.echo(scheduler.render(job), nl=False)
        else:
            raise typer.Exit(submit(job, run, wait, fresh=True))
    except SlurmError as error:
        fail(str(error))


def _pretend_to_prepare(
    recipe: Path, plan: Path | None, cluster: str | None, name: str | None, world: int
) -> RunFolder:
    """The folder `prepare_run` would write, with the files checked as it does."""
    checked = check_all(recipe, plan, cluster, default=fully_sharded(world))
    check_own_model(with_absolute_paths(checked.recipe, recipe.parent), recipe, checked.plan, plan)
    return choose_folder(name, checked.recipe.name)
