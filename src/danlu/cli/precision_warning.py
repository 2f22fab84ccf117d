"""A warning before a run starts in a precision in which its chips are slow."""

import typer

from danlu.report.precision_text import slow_precision_note
from danlu.spec.check import RunSpec


def warn_slow_precision(checked: RunSpec) -> None:
    """Print to standard error what the precision costs, if the cluster's chip is far faster in another."""
    if note := slow_precision_note(checked.recipe, checked.plan, checked.cluster):
        typer.echo(f"warning: {note}", err=True)
