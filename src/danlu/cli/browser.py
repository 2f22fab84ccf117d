"""Show a page in the browser, if there is one."""

import os
import sys
import webbrowser
from pathlib import Path

import typer


def open_in_browser(page: Path) -> None:
    """Open a page; if that is impossible, print the reason and the path of the page."""
    reason = _why_no_browser()
    if not reason and not webbrowser.open(page.resolve().as_uri()):
        reason = "the browser did not start"
    if reason:
        typer.echo(f"The page was not opened, because {reason}: {page}")


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
