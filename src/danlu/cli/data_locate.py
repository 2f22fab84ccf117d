"""`danlu data locate`: which documents a step of a run reads."""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Table
from rich.text import Text

from danlu.cli.json_output import print_json
from danlu.cli.run_options import RunsDirOption
from danlu.report.terminal import Console
from danlu.spec import Cluster, Plan, Recipe, load_cluster, load_plan, load_recipe
from danlu.spec.recipe import BatchConfig
from danlu.spec.recipe_paths import resolve_recipe_paths
from danlu.spec.run_folder import DEFAULT_RUNS_DIR
from danlu.storage.data.mixture_dataset import MixtureDataset
from danlu.storage.data.sample_provenance import Decode, SampleProvenance, trace_samples
from danlu.storage.data.token_shards import rank_sample_indices
from danlu.storage.data.tokenizer import open_tokenizer
from danlu.storage.data.version_log import DatasetVersionLog

_TEXT_WIDTH = 60


def locate(
    run: Annotated[str, typer.Argument(metavar="RUN_OR_RECIPE", help="Name or folder of a run, or a recipe.")],
    step: Annotated[int | None, typer.Option(min=1, help="The step, numbered from 1 as in the run's events.")] = None,
    sample: Annotated[
        int | None, typer.Option(min=0, help="First sample of the batch instead, as in the event of a spike.")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Only what this rank read; default: the full batch.")] = None,
    plan: Annotated[Path | None, typer.Option(help="Plan for a recipe; a run has its own.")] = None,
    folder: RunsDirOption = DEFAULT_RUNS_DIR,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show which documents the samples of a step contain: source, shard, tokens, and how they begin."""
    if step is None and sample is None:
        raise typer.BadParameter("is missing: which batch?", param_hint="--step or --sample")
    recipe, data_rank, data = _open_run_or_recipe(run, plan, folder, rank)
    if step is not None:
        sample = _first_sample(run, folder, step, recipe.batch)
    assert sample is not None
    rows = rank_sample_indices(sample, recipe.batch.sequences_at(sample))
    if data_rank is not None:
        rows = rank_sample_indices(int(rows[0]), len(rows), *data_rank)
    found = trace_samples(data, np.asarray(rows), _decoder(recipe, data))
    if as_json:
        print_json([sample.model_dump(mode="json") for sample in found])
    else:
        which = f"samples from {sample:,}" if step is None else f"step {step}"
        Console().print(_table(found, which, rank))


DataRank = tuple[int, int]
"""Index of a rank's share of the batch, and the number of shares."""


def _open_run_or_recipe(
    name: str, plan: Path | None, folder: Path, rank: int | None
) -> tuple[Recipe, DataRank | None, MixtureDataset]:
    """Recipe, a rank's share, and data: of a run as it reads them, or of a recipe as a new run would."""
    from danlu.report.run_tables import find_run

    if name.endswith(".toml"):
        path = Path(name)
        if folder != DEFAULT_RUNS_DIR:
            raise typer.BadParameter("is where runs are searched, but a recipe is a file", param_hint="--runs-dir")
        recipe = resolve_recipe_paths(load_recipe(path), path.parent)
        return recipe, _data_rank(load_plan(plan) if plan else Plan(), None, rank), _open_data(recipe)
    if plan is not None:
        raise typer.BadParameter("a run has its own plan: omit it", param_hint="--plan")
    run = find_run(name, folder)
    recipe = load_recipe(run.recipe)
    data = _open_data(recipe)
    if entries := DatasetVersionLog(run.data).read():
        data.set_version_schedule([(entry.cursor, entry.editions) for entry in entries])
    cluster = load_cluster(str(run.cluster)) if run.cluster.exists() else None
    return recipe, _data_rank(load_plan(run.plan), cluster, rank), data


def _first_sample(name: str, folder: Path, step: int, batch: BatchConfig) -> int:
    """Number of the first sample of a step: of a run as it went, of a recipe as a new run would go."""
    from danlu.report.run_history import read_run_history
    from danlu.report.run_tables import find_run

    if name.endswith(".toml"):
        return batch.cursor_after(step - 1)
    return read_run_history(find_run(name, folder)).first_sample(step, batch)


def _open_data(recipe: Recipe) -> MixtureDataset:
    return MixtureDataset.from_recipe(
        recipe.data, recipe.batch.length, recipe.seed, on_warning=lambda text: typer.echo(f"warning: {text}", err=True)
    )


def _data_rank(plan: Plan, cluster: Cluster | None, rank: int | None) -> DataRank | None:
    from danlu.comm.rank_layout import dense_layout

    if rank is None:
        return None
    degrees = plan.degrees
    if rank >= degrees.world:
        raise typer.BadParameter(f"must be below {degrees.world}, the ranks of the plan", param_hint="--rank")
    coordinates = dense_layout(plan, cluster).coordinates(rank)
    return coordinates["replicate"] * degrees.shard + coordinates["shard"], degrees.dp


def _decoder(recipe: Recipe, data: MixtureDataset) -> Decode | None:
    """The recipe's tokenizer, if the data was built with it."""
    tokenizer = open_tokenizer(recipe.data.tokenizer)
    if any(shards.index.tokenizer != tokenizer.name for shards in data.sources):
        typer.echo(
            "warning: the data was built with another tokenizer than the recipe's, so no text is shown", err=True
        )
        return None
    return tokenizer.decode


def _table(found: list[SampleProvenance], which: str, rank: int | None) -> Table:
    who = "all ranks" if rank is None else f"rank {rank}"
    table = Table(title=f"{which}, {who}", title_justify="left")
    for name in ("sample", "data set", "epoch", "tokens", "shard", "document", "begins"):
        table.add_column(name, justify="right" if name in ("sample", "epoch", "document") else "left")
    for sample in found:
        files = ", ".join(dict.fromkeys(shard.file for shard in sample.shards))
        for number, excerpt in enumerate(sample.documents):
            first = (str(sample.index), Path(sample.where).name, str(sample.epoch)) if not number else ("", "", "")
            shown = "".join(c if c.isprintable() else " " for c in excerpt.text)[:_TEXT_WIDTH]
            document = "?" if excerpt.document is None else str(excerpt.document)
            table.add_row(
                *first, f"{excerpt.tokens[0]}–{excerpt.tokens[1] - 1}", "" if number else files, document, Text(shown)
            )
    return table
