"""`danlu dryrun`: one step of a run of any size, on this machine, without its memory or its network."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from danlu.report.trace import memory_table, traffic_table
from danlu.spec import Plan
from danlu.spec.check import check_all
from danlu.spec.trace import Trace


def dryrun(
    recipe: Annotated[Path, typer.Argument(help="What to train.", metavar="RECIPE.toml")],
    plan: Annotated[Path | None, typer.Option(help="How it runs; one rank if left out.")] = None,
    cluster: Annotated[str | None, typer.Option(help="A cluster of the catalogue, or its file.")] = None,
    ranks: Annotated[str, typer.Option(help="Ranks to run: numbers, first, last, joined by commas.")] = "first,last",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run the real program for one step without the machine: what each rank sends, and the memory it needs.

    Builds the model and takes whole optimiser steps as the chosen ranks, on tensors without memory and a
    network without peers. The batch is the recipe's; experts are taken for evenly loaded.
    """
    checked = check_all(recipe, plan, cluster, default=Plan())
    numbers = _ranks(ranks, checked.plan.degrees.world)
    from danlu.framework.dryrun import NotYetDryError, dry_run

    console, errors = Console(), Console(stderr=True)
    traces: list[Trace] = []
    for number in numbers:
        with errors.status(f"rank {number:,} of {checked.plan.degrees.world:,}"):
            try:
                traces.append(dry_run(checked.recipe, checked.plan, checked.cluster, number))
            except NotYetDryError as error:
                typer.echo(str(error), err=True)
                raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps([trace.model_dump(mode="json") for trace in traces], indent=2))
        return
    for trace in traces:
        console.print(traffic_table(trace))
    console.print(memory_table(traces))


def _ranks(text: str, world: int) -> list[int]:
    """Ranks by number or name, each once."""
    named = {"first": 0, "last": world - 1}
    found: list[int] = []
    for word in text.split(","):
        number = named.get(word.strip(), int(word) if word.strip().isdigit() else -1)
        if not 0 <= number < world:
            raise typer.BadParameter(f'--ranks: "{word}" must be `first`, `last` or a number from 0 to {world - 1}')
        if number not in found:
            found.append(number)
    return found
