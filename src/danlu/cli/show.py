"""`danlu show`: one run in a table, and its page in the browser."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from danlu.cli.browser import open_in_browser
from danlu.cli.json_output import print_json
from danlu.cli.run_options import RunsDirOption
from danlu.report.terminal import Console
from danlu.spec import RunFolder
from danlu.spec.run_folder import DEFAULT_RUNS_DIR


def show(
    run: Annotated[str, typer.Argument(help="Name of the run, or the path of its folder.", metavar="RUN")],
    folder: RunsDirOption = DEFAULT_RUNS_DIR,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; opens nothing.")] = False,
) -> None:
    """Show one run: its figures here, its page in the browser."""
    from danlu.report.run_tables import find_run, summarize_run, summary

    found = find_run(run, folder)
    page, trouble = update_page(found)
    if as_json:
        print_json(asdict(summarize_run(found)) | {"page": str(page) if page else None})
        return
    Console().print(summary(found))
    if trouble:
        typer.echo(trouble, err=True)
    if open_page and page:
        open_in_browser(page)


def update_page(run: RunFolder) -> tuple[Path | None, str]:
    """The run's current page, and what kept it from being written.

    For another user's run, or if it cannot be written, it is the existing one.
    """
    from danlu.report.run_page import write_run_page

    if run.path.stat().st_uid == os.geteuid():
        try:
            return write_run_page(run), ""
        except OSError as error:
            why = f"it cannot be written ({error.strerror})"
    else:
        why = f"the run is {run.path.owner()}'s"
    if run.report.exists():
        return run.report, f"The page was not updated: {why}."
    return None, f"There is no page: {why}."
