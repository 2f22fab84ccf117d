"""`danlu dryrun`: one step of a run of any size, on this machine, without its memory or its network."""

import time
from pathlib import Path
from typing import Annotated

import typer

from danlu.cli.custom_model import check_custom_model
from danlu.cli.dryrun_output import write_dryrun_page
from danlu.cli.recipe_paths import resolve_recipe_paths
from danlu.comm.rank_layout import dense_ranks
from danlu.report import formatting
from danlu.report.dryrun_tables import memory_table, operator_table, table_notes, traffic_table
from danlu.report.terminal import Console
from danlu.spec import Plan
from danlu.spec.check import load_run_spec
from danlu.spec.cluster import Cluster
from danlu.spec.trace import DryRun

MAX_DEFAULT_PP_RANKS = 4
"""Up to this many pp ranks are all run by default."""


def dryrun(
    recipe: Annotated[Path, typer.Argument(help="What to train.", metavar="RECIPE.toml")],
    plan: Annotated[Path | None, typer.Option(help="How it runs; one rank if omitted.")] = None,
    cluster: Annotated[str | None, typer.Option(help="A cluster of the catalog, or its file.")] = None,
    ranks: Annotated[
        str,
        typer.Option(
            help="Ranks to run: numbers, first, last, joined by commas; or classes, one rank per pp rank. "
            f"Default: classes, or the first and last of more than {MAX_DEFAULT_PP_RANKS}."
        ),
    ] = "",
    whole: Annotated[
        bool, typer.Option("--whole", help="Run every layer, also those identical to their neighbors.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write JSON to this file as well.", metavar="FILE.json")] = None,
    page: Annotated[Path | None, typer.Option(help="Write the page to this file.", metavar="FILE.html")] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Write the page and open it in the browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run the real program for one step without the machine: what each rank computes, sends and holds.

    Builds the model and runs a full optimizer step as the chosen ranks, on tensors without memory and a network
    without peers. The batch is the recipe's; experts are assumed to be evenly loaded. Layers that are identical to
    their neighbors are extrapolated rather than run; the last lines say how many.
    """
    checked = load_run_spec(recipe, plan, cluster, default=Plan())
    resolved = resolve_recipe_paths(checked.recipe, recipe.parent)
    check_custom_model(resolved, recipe, checked.plan, plan)
    numbers = _ranks(ranks, checked.plan, checked.cluster)
    from danlu.dryrun.dry_run import dry_run_ranks

    errors = Console(stderr=True)
    started = time.monotonic()
    with errors.status("") as status:

        def on_rank(rank: int) -> None:
            status.update(
                f"rank {rank:,} of {checked.plan.degrees.world:,}, {numbers.index(rank) + 1} of {len(numbers)}"
            )

        run = dry_run_ranks(resolved, checked.plan, checked.cluster, numbers, all_layers=whole, on_rank=on_rank)
    text = run.model_dump_json()
    if out is not None:
        out.write_text(text + "\n")
        errors.print(f"{formatting.relative_path(out.absolute())}: {len(run.traces)} ranks")
    if as_json:
        for note in run.notes:
            errors.print(note, style="yellow")
        typer.echo(text)
    else:
        _print(run, time.monotonic() - started)
    if page is not None or open_page:
        write_dryrun_page(run, page, open_page)


def _print(run: DryRun, seconds: float) -> None:
    console = Console()
    for trace in run.traces:
        console.print(traffic_table(trace))
    for trace in run.traces:
        console.print(operator_table(trace))
    console.print(memory_table(run))
    for line in table_notes(run):
        console.print(line, highlight=False)
    console.print(f"{formatting.duration(seconds)} in all", highlight=False)


def _ranks(text: str, plan: Plan, cluster: Cluster | None) -> list[int]:
    """Ranks by number or name, each once."""
    classes = dense_ranks(plan, cluster)[:, 0, 0, 0, 0].tolist()
    if not text:
        return classes if len(classes) <= MAX_DEFAULT_PP_RANKS else [classes[0], classes[-1]]
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
