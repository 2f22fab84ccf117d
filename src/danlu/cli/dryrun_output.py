"""Writes and opens the page of a dry run."""

from pathlib import Path

from danlu.cli.browser import write_page
from danlu.spec.trace import DryRun


def write_dryrun_page(run: DryRun, page: Path | None, open_page: bool, *, err: bool = False) -> None:
    """Write the page for `--html FILE` and `--open`, print its path or open it; do nothing if neither is given.

    With `err`, what is printed goes to standard error. Without a file it is `<name>.dryrun.html` in the current folder.
    """
    if page is None and not open_page:
        return
    from danlu.report.dryrun_page import dryrun_page

    page = page or Path(f"{run.name}.dryrun.html")
    write_page(page, dryrun_page(run), open_page=open_page, err=err)
