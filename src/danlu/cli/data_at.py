"""`danlu data at`: which documents a step of a run reads."""

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from danlu.cli.paths import with_absolute_paths
from danlu.spec import Cluster, Plan, Recipe, load_cluster, load_plan, load_recipe
from danlu.storage.taken_up import TakenUpLog
from danlu.storage.tokenizer import open_tokenizer
from danlu.storage.tokens import batch_rows
from danlu.storage.training_data import TrainingData
from danlu.storage.whereabouts import Decode, LocatedSample, locate

_WIDTH = 60


def at(
    run: Annotated[str, typer.Argument(metavar="RUN_OR_RECIPE", help="Name or folder of a run, or a recipe.")],
    step: Annotated[int, typer.Option(min=1, help="The step, as the run's events number it: from 1 on.")],
    rank: Annotated[int | None, typer.Option(min=0, help="What this rank read; the whole batch if left out.")] = None,
    plan: Annotated[Path | None, typer.Option(help="The layout of a recipe; a run has its own.")] = None,
    folder: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show which documents the samples of a step hold: source, shard, tokens, and how they begin."""
    recipe, share, data = _opened(run, plan, folder, rank)
    rows = batch_rows((step - 1) * recipe.batch.sequences, recipe.batch.sequences)
    if share is not None:
        rows = batch_rows(int(rows[0]), len(rows), *share)
    found = locate(data, np.asarray(rows), _decoder(recipe, data))
    if as_json:
        typer.echo(json.dumps([sample.model_dump(mode="json") for sample in found], indent=2))
    else:
        Console().print(_table(found, step, rank))


Share = tuple[int, int]
"""Which share of the batch a rank reads, and of how many."""


def _opened(name: str, plan: Path | None, folder: Path, rank: int | None) -> tuple[Recipe, Share | None, TrainingData]:
    """Recipe, a rank's share, and data: of a run as it reads them, or of a recipe as a new run would."""
    from danlu.report.runs import find_run

    if name.endswith(".toml"):
        path = Path(name)
        recipe = with_absolute_paths(load_recipe(path), path.parent)
        return recipe, _share(load_plan(plan) if plan else Plan(), None, rank), _data(recipe)
    if plan is not None:
        raise typer.BadParameter("a run has a plan of its own: leave it out", param_hint="--plan")
    run = find_run(name, folder)
    recipe = load_recipe(run.recipe)
    data = _data(recipe)
    if promises := TakenUpLog(run.data).read():
        data.take_up([(promise.cursor, promise.editions) for promise in promises])
    cluster = load_cluster(str(run.cluster)) if run.cluster.exists() else None
    return recipe, _share(load_plan(run.plan), cluster, rank), data


def _data(recipe: Recipe) -> TrainingData:
    return TrainingData.of(
        recipe.data, recipe.batch.length, recipe.seed, on_warning=lambda text: typer.echo(f"warning: {text}", err=True)
    )


def _share(plan: Plan, cluster: Cluster | None, rank: int | None) -> Share | None:
    from danlu.comm.layout import dense_layout

    if rank is None:
        return None
    degrees = plan.degrees
    if rank >= degrees.world:
        raise typer.BadParameter(f"must be below {degrees.world}, the ranks of the plan", param_hint="--rank")
    place = dense_layout(plan, cluster).place(rank)
    return place["replicate"] * degrees.shard + place["shard"], degrees.data


def _decoder(recipe: Recipe, data: TrainingData) -> Decode | None:
    """The recipe's tokenizer, if it is the one the data was made with."""
    tokenizer = open_tokenizer(recipe.data.tokenizer)
    if any(shards.index.tokenizer != tokenizer.name for shards in data.sources):
        typer.echo("warning: the data was made with another tokenizer than the recipe's, so no text is shown", err=True)
        return None
    return tokenizer.decode


def _table(found: list[LocatedSample], step: int, rank: int | None) -> Table:
    who = "all ranks" if rank is None else f"rank {rank}"
    table = Table(title=f"step {step}, {who}", title_justify="left")
    for name in ("sample", "data set", "epoch", "tokens", "shard", "document", "begins"):
        table.add_column(name, justify="right" if name in ("sample", "epoch", "document") else "left")
    for sample in found:
        files = ", ".join(dict.fromkeys(part.file for part in sample.shards))
        for number, part in enumerate(sample.documents):
            first = (str(sample.index), Path(sample.where).name, str(sample.epoch)) if not number else ("", "", "")
            shown = "".join(c if c.isprintable() else " " for c in part.text)[:_WIDTH]
            document = "?" if part.document is None else str(part.document)
            table.add_row(
                *first, f"{part.tokens[0]}–{part.tokens[1] - 1}", "" if number else files, document, Text(shown)
            )
    return table
