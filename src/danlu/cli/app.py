"""Every command of `danlu`, in the order a user meets them."""

import sys
from typing import Annotated

import typer

from danlu import __version__
from danlu.cli import ckpt, data, export_hf, import_hf
from danlu.cli.catalogue import catalogue
from danlu.cli.check import check
from danlu.cli.chips import chips
from danlu.cli.dryrun import dryrun
from danlu.cli.launch import launch
from danlu.cli.plan import PlanCommand, plan
from danlu.cli.probe import probe
from danlu.cli.resume import resume
from danlu.cli.runs import runs
from danlu.cli.schema import schema
from danlu.cli.show import show
from danlu.cli.slurm_task import slurm_failed, slurm_ranks, slurm_task
from danlu.cli.train import train
from danlu.cli.validate import validate
from danlu.cli.worker import worker
from danlu.spec import SpecError

app = typer.Typer(
    name="danlu",
    help="Train large models on the machines that are really there.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"danlu {__version__}")
        raise typer.Exit


@app.callback()
def _danlu(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


app.command()(train)
app.command()(resume)
app.command()(launch)
app.command()(runs)
app.command()(show)
app.command()(check)
app.command(cls=PlanCommand)(plan)
app.command()(dryrun)
app.command()(probe)
app.command()(validate)
app.add_typer(ckpt.app, name="ckpt")
app.add_typer(data.app, name="data")
app.add_typer(import_hf.app, name="import")
app.add_typer(export_hf.app, name="export")
app.command()(catalogue)
app.command()(chips)
app.command()(schema)
app.command(hidden=True)(worker)
app.command("slurm-ranks", hidden=True)(slurm_ranks)
app.command("slurm-task", hidden=True)(slurm_task)
app.command("slurm-failed", hidden=True)(slurm_failed)


def main() -> None:
    """Run a command; what the user can mend is printed without a traceback, with exit code 2."""
    try:
        app()
    except SpecError as error:
        typer.echo(str(error), err=True)
        sys.exit(2)
