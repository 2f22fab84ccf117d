"""Show a page in the browser, if there is one."""

import os
import sys
import webbrowser
from pathlib import Path

import typer


def write_page(page: Path, html: str, *, open_page: bool, err: bool = False) -> None:
    """Write a page and open it, or print its path (on standard error if `err`); exit with 2 if that fails."""
    try:
        page.write_text(html, encoding="utf-8")
    except OSError as error:
        typer.echo(f"The page cannot be written: {error}", err=True)
        raise typer.Exit(2) from None
    if open_page:
        open_in_browser(page, err=err)
    else:
        typer.echo(f"The page is in {page}", err=err)


def open_in_browser(page: Path, *, err: bool = False) -> None:
    """Open a page; if that is impossible, print the reason and the path of the page, on standard error if `err`."""
    reason = _why_no_browser()
    if not reason and not webbrowser.open(page.resolve().as_uri()):
        reason = "the browser did not start"
    if reason:
        typer.echo(f"The page was not opened, because {reason}: {page}", err=err)


def _why_no_browser() -> str:
    """Why a page cannot be shown here; empty when it can."""
    if not sys.stdout.isatty():
        return "the output is not a terminal"
    # Without a display the module would start a text browser, which shows no images.
    has_display = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if not has_display and not os.environ.get("BROWSER"):
        return "there is no display"
    try:
        webbrowser.get()
    except webbrowser.Error:
        return "there is no browser"
    return ""
