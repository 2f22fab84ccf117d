"""Options that several commands share, and the resources they request from Slurm."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from danlu.scheduler import SlurmJob
from danlu.scheduler.sbatch_script import check_sbatch_option
from danlu.spec import RunFolder


def _check_sbatch_options(options: list[str] | None) -> list[str]:
    try:
        for option in options or []:
            check_sbatch_option(option)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return options or []


RecipeArgument = Annotated[Path, typer.Argument(help="What to train.", metavar="RECIPE.toml")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, or the path of its folder.")]
PlanOption = Annotated[Path | None, typer.Option(help="Parallel layout; default: FSDP over all ranks.")]
ClusterOption = Annotated[str | None, typer.Option(help="A cluster of the catalog, or its file.")]
NameOption = Annotated[str | None, typer.Option(help="Name of the run; default: the recipe's.")]
RunsDirOption = Annotated[Path, typer.Option("--runs-dir", help="Folder of the runs.")]
RanksPerNodeOption = Annotated[
    int | None, typer.Option(min=1, help="Default: what the plan needs, or one per chip of the cluster, or 1.")
]
SparesOption = Annotated[
    int | None,
    typer.Option(min=0, help="Further nodes that wait: a node that is lost does not end the job. Default: it does."),
]
PartitionOption = Annotated[str | None, typer.Option(help="Slurm's partition.")]
AccountOption = Annotated[str | None, typer.Option(help="Slurm's account.")]
TimeLimitOption = Annotated[str | None, typer.Option(help="Time limit in Slurm's format: 1-12:00:00.")]
SbatchOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OPTION", help="A further option for sbatch: --sbatch=--exclusive.", callback=_check_sbatch_options
    ),
]
WaitOption = Annotated[bool, typer.Option("--wait", help="Follow the run; exit with the job's exit code.")]


@dataclass(frozen=True)
class ResourceRequest:
    """Resources to request from Slurm."""

    nodes: int
    ranks_per_node: int
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    sbatch_options: tuple[str, ...] = ()
    spares: int | None = None

    def to_job(self, run: RunFolder) -> SlurmJob:
        """The job of a run."""
        return SlurmJob(
            name=run.name,
            workdir=str(Path.cwd()),
            run_folder=str(run.path),
            python=sys.executable,
            nodes=self.nodes,
            tasks_per_node=self.ranks_per_node,
            time=self.time,
            partition=self.partition,
            account=self.account,
            extra_options=self.sbatch_options,
            spares=self.spares,
        )
