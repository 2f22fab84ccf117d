"""Every command of `danlu`, in the order in which users need them."""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from danlu.cli import ckpt, comm, data, export_hf, import_hf, lab, ops
from danlu.cli.catalog import catalog
from danlu.cli.chaos import chaos
from danlu.cli.check import check
from danlu.cli.chips import chips
from danlu.cli.compare import compare
from danlu.cli.dryrun import dryrun
from danlu.cli.evaluate import evaluate
from danlu.cli.launch import launch
from danlu.cli.option_rules import apply_option_rules
from danlu.cli.plan import PlanCommand, plan
from danlu.cli.probe import probe
from danlu.cli.profile import profile
from danlu.cli.renamed import refuse_renamed
from danlu.cli.resume import resume
from danlu.cli.rm import rm
from danlu.cli.runs import runs
from danlu.cli.sample import sample
from danlu.cli.schema import schema
from danlu.cli.show import show
from danlu.cli.slurm_commands import slurm_agent, slurm_coordinate, slurm_ended, slurm_ranks, slurm_task
from danlu.cli.stop import stop
from danlu.cli.top import top
from danlu.cli.train import train
from danlu.cli.why import why
from danlu.report.terminal import escape_streams
from danlu.spec import SpecError
from danlu.spec.text import printable
from danlu.storage.run_lock import RunError
from danlu.version import __version__


class EscapingGroup(TyperGroup):
    """The commands; control characters in their output are escaped."""

    def invoke(self, ctx: Any) -> Any:
        """Run the requested command."""
        with escape_streams():
            return super().invoke(ctx)


app = typer.Typer(
    name="danlu",
    cls=EscapingGroup,
    help="Train large models in PyTorch on one machine or a cluster: plan, dry-run, train, resume.",
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
app.command()(stop)
app.command()(runs)
app.command()(show)
app.command()(why)
app.command()(chaos)
app.command()(compare)
app.command()(evaluate)
app.command()(sample)
app.command()(profile)
app.command()(rm)
app.command()(check)
app.command(cls=PlanCommand)(plan)
app.command()(dryrun)
app.command()(probe)
app.add_typer(comm.app, name="comm")
app.add_typer(ops.app, name="ops")
app.add_typer(ckpt.app, name="ckpt")
app.add_typer(data.app, name="data")
app.add_typer(import_hf.app, name="import")
app.add_typer(export_hf.app, name="export")
app.add_typer(lab.app, name="lab")
app.command()(top)
app.command()(catalog)
app.command()(chips)
app.command()(schema)
app.command("slurm-ranks", hidden=True)(slurm_ranks)
app.command("slurm-task", hidden=True)(slurm_task)
app.command("slurm-coordinate", hidden=True)(slurm_coordinate)
app.command("slurm-agent", hidden=True)(slurm_agent)
app.command("slurm-ended", hidden=True)(slurm_ended)
refuse_renamed(app)
refuse_renamed(ckpt.app, "ckpt")
refuse_renamed(data.app, "data")
apply_option_rules(app)


def main() -> None:
    """Run a command; errors that the user can fix are printed without a traceback, with exit code 2."""
    try:
        app()
    except (SpecError, RunError) as error:
        typer.echo(printable(str(error)), err=True)
        sys.exit(2)
