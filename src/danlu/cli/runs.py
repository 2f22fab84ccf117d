"""`danlu runs`: every run of a folder in one table."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def runs(
    folder: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """List all runs: how far, how good, how fast, and how they ended."""
    from danlu.report.runs import list_runs, runs_table

    summaries = list_runs(folder)
    if as_json:
        typer.echo(json.dumps([asdict(summary) for summary in summaries], indent=2))
    elif not summaries:
        typer.echo(f"There are no runs in {folder} yet: `danlu train` makes one.")
    else:
        # a file or a pipe has no width of its own: give it every column
        console = Console() if sys.stdout.isatty() else Console(width=200)
        console.print(runs_table(summaries, width=console.width))
