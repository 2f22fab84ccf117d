"""`danlu evaluate`: the loss of a checkpoint on held-out data."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from danlu.cli.ckpt_ref import JsonOption, fail, resolve_ref
from danlu.cli.json_output import print_json
from danlu.cli.run_checkpoint import RunStepArgument, parse_run_step
from danlu.cli.run_options import PlanOption, RunsDirOption
from danlu.report import formatting
from danlu.report.evaluations import perplexity
from danlu.report.run_tables import find_run
from danlu.report.terminal import Console
from danlu.spec import EvaluationEvent, load_recipe
from danlu.spec.names import sanitize_name
from danlu.spec.recipe import EvaluationSource
from danlu.spec.run_folder import DEFAULT_RUNS_DIR


def evaluate(
    run: RunStepArgument,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]SHARDS", help="A held-out data set; may be repeated. Default: those of the run's recipe."
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens to read of each data set; default: the recipe's.")
    ] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Ranks on this machine; default: 1.")] = None,
    plan: PlanOption = None,
    folder: RunsDirOption = DEFAULT_RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a checkpoint of a run: loss and perplexity on held-out data, the same number at any layout.

    The run is only read, so it may still be training.
    """
    from danlu.runs.evaluate import evaluate as evaluate_checkpoint
    from danlu.runs.train import TrainError

    name, _ = parse_run_step(run)
    found = find_run(name, folder)
    if not data and not load_recipe(found.recipe).evaluation.data:
        fail(f"{name}: its recipe has no held-out data\n    → name some: --data SHARDS (`danlu data build` makes them)")
    step = resolve_ref(run, folder).entry().step
    console = Console(highlight=False, quiet=as_json)
    try:
        event = evaluate_checkpoint(
            found, step, _sources(data or []), tokens=tokens, plan=plan, nproc=nproc, console=console
        )
    except TrainError as error:
        fail(str(error))
    if as_json:
        print_json(_figures(found.name, event), indent=None)
    else:
        console.print(_table(found.name, event))


def _sources(data: list[str]) -> list[EvaluationSource]:
    """Data sets as given on the command line, named after their folders unless a name is given."""
    sources = []
    for text in data:
        name, given, shards = text.rpartition("=")
        where = shards if "://" in shards else str(Path(shards).resolve())
        sources.append(EvaluationSource(name=name if given else sanitize_name(Path(shards).name), shards=where))
    return sources


def _figures(run: str, event: EvaluationEvent) -> dict[str, object]:
    return {
        "run": run,
        "step": event.step,
        "loss": event.loss,
        "seconds": event.seconds,
        "data": {
            name: {"loss": loss, "perplexity": perplexity(loss), "tokens": event.tokens[name]}
            for name, loss in event.losses.items()
        },
    }


def _table(run: str, event: EvaluationEvent) -> Table:
    table = Table(
        box=None, pad_edge=False, header_style="bold", title=escape(f"{run}@{event.step}"), title_justify="left"
    )
    table.add_column("data set")
    for heading in ("tokens", "loss", "perplexity"):
        table.add_column(heading, justify="right")
    rows = [(name, event.tokens[name], loss) for name, loss in event.losses.items()]
    if len(rows) > 1:
        rows.append(("all", sum(event.tokens.values()), event.loss))
    for name, count, loss in rows:
        table.add_row(escape(name), f"{count:,}", formatting.loss(loss), formatting.number(perplexity(loss)))
    return table
