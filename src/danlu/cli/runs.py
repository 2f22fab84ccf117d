"""`danlu runs`: every run of a folder in one table."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from danlu.cli.json_output import print_json
from danlu.cli.run_options import RunsDirOption
from danlu.report.terminal import Console


def runs(
    folder: RunsDirOption = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List all runs: progress, loss, speed, and how they ended."""
    from danlu.report.run_tables import list_runs, private_folders, runs_table

    summaries = list_runs(folder)
    if as_json:
        print_json([asdict(summary) for summary in summaries])
    elif not summaries:
        typer.echo(f"There are no runs in {folder} yet: `danlu train` makes one.")
    else:
        # a file or a pipe has no width: show every column
        console = Console() if sys.stdout.isatty() else Console(width=200)
        console.print(runs_table(summaries, width=console.width))
    if private := private_folders(folder):
        names = ", ".join(path.name for path in private)
        typer.echo(f"not shown, because they are private to others: {names}", err=True)
