"""Commands and options that had another name in version 0.1: they are refused, with the name they have now."""

from collections.abc import Collection, Iterable

import typer

RENAMED = {
    "catalogue": "danlu catalog",
    "ckpt mend": "danlu ckpt repair",
    "data at": "danlu data locate",
    # its published runs are no part of the package
    "validate": "python benchmarks/validation/validate.py, in a clone of Danlu's repository",
}

RENAMED_OPTIONS = {
    "--folder": "--runs-dir",
    "--leanest": "--min-memory",
    "--longest": "--max-length",
    "--out": "--output",
    "--page": "--html",
    "--store": "--rdzv-endpoint",
    "--whole": "--all-layers",
    "--without": "--exclude",
}


def renamed_option(words: Iterable[str], options: Collection[str]) -> str | None:
    """What to say of the first word that is the old name of one of a command's `options`."""
    for word in words:
        old = word.partition("=")[0]
        new = RENAMED_OPTIONS.get(old)
        if new in options and old not in options:
            return f"{old} is now called: {new}"
    return None


def refuse_renamed(app: typer.Typer, group: str = "") -> None:
    """Give an app hidden commands by the old names of its own, which say the new one; exit code 2."""
    for old, new in RENAMED.items():
        above, _, name = old.rpartition(" ")
        if above == group:
            _refuse(app, name, f"danlu {old} is now called: {new}")


def _refuse(app: typer.Typer, name: str, message: str) -> None:
    @app.command(name, hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def refused() -> None:
        typer.echo(message, err=True)
        raise typer.Exit(2)
