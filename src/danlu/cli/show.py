"""`danlu show`: one run in a table, and its page in the browser."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from danlu.cli.browser import open_in_browser


def show(
    run: Annotated[str, typer.Argument(help="Name of the run, or the path of its folder.", metavar="RUN")],
    folder: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = Path("runs"),
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines; opens nothing.")] = False,
) -> None:
    """Show one run: its figures here, its page in the browser."""
    from danlu.report.page import write_page
    from danlu.report.runs import find_run, summarise, summary_table

    found = find_run(run, folder)
    try:
        page = write_page(found)
    except PermissionError as error:
        typer.echo(f"The page cannot be written: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(asdict(summarise(found)) | {"page": str(page)}, indent=2))
        return
    Console().print(summary_table(found))
    if open_page:
        open_in_browser(page)
