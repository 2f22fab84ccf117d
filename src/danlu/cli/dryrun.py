"""`danlu dryrun`: one step of a run of any size, on this machine, without its memory or its network."""

import time
from pathlib import Path
from typing import Annotated

import typer

from danlu.cli.dryrun_output import write_dryrun_page
from danlu.cli.run_options import ClusterOption, RecipeArgument
from danlu.dryrun import api
from danlu.dryrun.api import MAX_DEFAULT_PP_RANKS, RankError
from danlu.report import formatting
from danlu.report.dryrun_tables import memory_table, operator_table, table_notes, traffic_table
from danlu.report.terminal import Console
from danlu.spec.trace import DryRun


def dryrun(
    recipe: RecipeArgument,
    plan: Annotated[Path | None, typer.Option(help="How it runs; one rank if omitted.")] = None,
    cluster: ClusterOption = None,
    ranks: Annotated[
        str,
        typer.Option(
            help="Ranks to run: numbers, first, last, joined by commas; or classes, one rank per pp rank. "
            f"Default: classes, or the first and last of more than {MAX_DEFAULT_PP_RANKS}."
        ),
    ] = "",
    whole: Annotated[
        bool, typer.Option("--all-layers", help="Run every layer, also those identical to their neighbors.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write JSON to this file as well.", metavar="FILE.json")
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--html", help="Write the page to this file.", metavar="FILE.html")
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Write the page and open it in the browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run the real program for one step without the machine: what each rank computes, sends and holds.

    Builds the model and runs a full optimizer step as the chosen ranks, on tensors without memory and a network
    without peers. The batch is the recipe's; experts are assumed to be evenly loaded. Layers that are identical to
    their neighbors are extrapolated rather than run; the last lines say how many.
    """
    errors = Console(stderr=True)
    started = time.monotonic()
    with errors.status("") as status:

        def on_rank(rank: int, number: int, count: int) -> None:
            status.update(f"rank {rank:,}, {number} of {count}")

        words = [word.strip() for word in ranks.split(",")] if ranks else []
        chosen = [int(word) if word.isdigit() else word for word in words]
        try:
            run = api.dryrun(recipe, plan=plan, cluster=cluster, ranks=chosen, whole=whole, on_rank=on_rank)
        except RankError as error:
            raise typer.BadParameter(f"--ranks: {error}") from None
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
        write_dryrun_page(run, page, open_page, err=as_json)


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
