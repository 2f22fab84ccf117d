"""`danlu validate`: compares predictions of the cost model with published training runs."""

import json
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from danlu.report.terminal import Console


def validate(
    page: Annotated[
        Path | None, typer.Option(help="Write a page with every run as a dot.", metavar="PAGE.html")
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every run.")] = False,
) -> None:
    """Predict every published run and compare: error, order of layouts, pick, memory; fails if a target is missed.

    The runs and their sources are included; constants were fitted only on the sets that begin with `fit-`.
    """
    from danlu.cost.validation import validate as run_validation
    from danlu.report.validation import validation_json, validation_tables, write_validation

    with Console(stderr=True).status("predicting the published runs"):
        found = run_validation()
    if open_page and page is None:
        page = Path("validation.html")
    if page is not None:
        try:
            write_validation(found, page)
        except OSError as error:
            typer.echo(f"The page cannot be written: {error}", err=True)
            raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(validation_json(found), indent=2))
    else:
        # a file or a pipe has no width of its own: give it every column
        console = Console() if sys.stdout.isatty() else Console(width=140)
        console.print(validation_tables(found))
    if open_page and page is not None and not webbrowser.open(page.resolve().as_uri()):
        typer.echo(f"The page was not opened, because the browser did not start: {page}", err=True)
    if not found.passed:
        raise typer.Exit(1)
