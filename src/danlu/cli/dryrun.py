"""`danlu dryrun`: one step of a run of any size, on this machine, without its memory or its network."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from danlu.cli.dryrun_page import show_dryrun
from danlu.cli.own_model import check_own_model
from danlu.cli.paths import with_absolute_paths
from danlu.comm.layout import dense_ranks
from danlu.report import wording
from danlu.report.trace import footer, memory_table, operator_table, traffic_table
from danlu.spec import Plan
from danlu.spec.check import check_all
from danlu.spec.cluster import Cluster
from danlu.spec.trace import DryRun

FEW_PLACES = 4
"""Places on a pipeline that are all run when nobody says which."""


def dryrun(
    recipe: Annotated[Path, typer.Argument(help="What to train.", metavar="RECIPE.toml")],
    plan: Annotated[Path | None, typer.Option(help="How it runs; one rank if left out.")] = None,
    cluster: Annotated[str | None, typer.Option(help="A cluster of the catalogue, or its file.")] = None,
    ranks: Annotated[
        str,
        typer.Option(
            help="Ranks to run: numbers, first, last, joined by commas; or classes, one rank of every place on the "
            f"pipeline. Left out: classes, or the first and last of more than {FEW_PLACES}."
        ),
    ] = "",
    whole: Annotated[bool, typer.Option("--whole", help="Run every layer, also those like their neighbours.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write JSON to this file as well.", metavar="FILE.json")] = None,
    page: Annotated[Path | None, typer.Option(help="Write the page to this file.", metavar="FILE.html")] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Write the page and open it in the browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run the real program for one step without the machine: what each rank computes, sends and holds.

    Builds the model and takes a whole optimiser step as the chosen ranks, on tensors without memory and a
    network without peers. The batch is the recipe's; experts are taken for evenly loaded. Layers that are like
    their neighbours are counted rather than run; the last lines say how many.
    """
    checked = check_all(recipe, plan, cluster, default=Plan())
    resolved = with_absolute_paths(checked.recipe, recipe.parent)
    check_own_model(resolved, recipe, checked.plan, plan)
    numbers = _ranks(ranks, checked.plan, checked.cluster)
    from danlu.framework.dryrun import dry_runs

    errors = Console(stderr=True)
    started = time.monotonic()
    with errors.status("") as status:

        def tell(rank: int) -> None:
            status.update(
                f"rank {rank:,} of {checked.plan.degrees.world:,}, {numbers.index(rank) + 1} of {len(numbers)}"
            )

        run = dry_runs(resolved, checked.plan, checked.cluster, numbers, whole=whole, tell=tell)
    text = run.model_dump_json()
    if out is not None:
        out.write_text(text + "\n")
        errors.print(f"{wording.path(out.absolute())}: {len(run.traces)} ranks")
    if as_json:
        for note in run.notes:
            errors.print(note, style="yellow")
        typer.echo(text)
    else:
        _print(run, time.monotonic() - started)
    if page is not None or open_page:
        show_dryrun(run, page, open_page)


def _print(run: DryRun, seconds: float) -> None:
    console = Console()
    for trace in run.traces:
        console.print(traffic_table(trace))
    for trace in run.traces:
        console.print(operator_table(trace))
    console.print(memory_table(run))
    for line in footer(run):
        console.print(line, highlight=False)
    console.print(f"{wording.duration(seconds)} in all", highlight=False)


def _ranks(text: str, plan: Plan, cluster: Cluster | None) -> list[int]:
    """Ranks by number or name, each once."""
    classes = dense_ranks(plan, cluster)[:, 0, 0, 0, 0].tolist()
    if not text:
        return classes if len(classes) <= FEW_PLACES else [classes[0], classes[-1]]
    world = plan.degrees.world
    named = {"first": [0], "last": [world - 1], "classes": classes}
    found: list[int] = []
    for word in (each.strip() for each in text.split(",")):
        numbers = named.get(word, [int(word)] if word.isdigit() and int(word) < world else [])
        if not numbers:
            raise typer.BadParameter(
                f'--ranks: "{word}" must be `first`, `last`, `classes` or a number from 0 to {world - 1}'
            )
        found += [number for number in numbers if number not in found]
    return found
