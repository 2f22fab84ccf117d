"""Writes and opens the page of a dry run."""

from pathlib import Path

import typer

from danlu.cli.browser import open_in_browser
from danlu.spec.trace import DryRun


def write_dryrun_page(run: DryRun, page: Path | None, open_page: bool) -> None:
    """Write the page for `--html FILE` and `--open`, print its path or open it; do nothing if neither is given.

    Without a file the page is `<name>.dryrun.html` in the current folder.
    """
    if page is None and not open_page:
        return
    from danlu.report.dryrun_page import dryrun_page

    page = page or Path(f"{run.name}.dryrun.html")
    try:
        page.write_text(dryrun_page(run), encoding="utf-8")
    except OSError as error:
        typer.echo(f"The page cannot be written: {error}", err=True)
        raise typer.Exit(2) from None
    if open_page:
        open_in_browser(page)
    else:
        typer.echo(f"The page is in {page}")
