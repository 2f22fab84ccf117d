"""`danlu compare`: several runs over each other."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from danlu.cli.browser import write_page
from danlu.cli.json_output import print_json
from danlu.cli.run_options import RunsDirOption
from danlu.report.run_comparison import Axis, compare_runs, find_runs
from danlu.report.terminal import Console
from danlu.spec.run_folder import DEFAULT_RUNS_DIR


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN …", help="Names of runs, or paths of their folders.")],
    axis: Annotated[Axis, typer.Option("--by", help="What the curves in the terminal are drawn over.")] = "step",
    page: Annotated[
        Path | None, typer.Option("--html", metavar="FILE.html", help="Write a page with all curves over each other.")
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open that page in the browser.")] = False,
    folder: RunsDirOption = DEFAULT_RUNS_DIR,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare runs: figures, losses over each other, the first step that differs, and which settings differ."""
    from danlu.report.comparison_tables import comparison_view

    comparison = compare_runs(find_runs(runs, folder))
    if as_json:
        print_json(comparison.to_json())
    else:
        # a file or a pipe has no width: give the table every column
        console = Console(highlight=False) if sys.stdout.isatty() else Console(width=200, highlight=False)
        colored = console.color_system is not None and not console.no_color
        console.print(comparison_view(comparison, width=console.width, colored=colored, axis=axis))
    if page is not None:
        from danlu.report.comparison_page import comparison_page

        write_page(page, comparison_page(comparison), open_page=open_page, err=as_json)
