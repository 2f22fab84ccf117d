"""`danlu catalog`: the models and clusters that are built into Danlu."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from danlu.cli.json_output import print_json
from danlu.cost import count_active_parameters, count_parameters
from danlu.report.formatting import count
from danlu.report.terminal import Console
from danlu.spec.catalog import catalog_entries as entries
from danlu.spec.cluster import Cluster
from danlu.spec.load import load_cluster, load_model
from danlu.spec.model import Model
from danlu.spec.problem import SpecError, problem_at, suggest_name


def catalog(
    name: Annotated[str | None, typer.Argument(help="Print the TOML of this entry, to redirect and edit.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the built-in models and clusters, or print one's TOML."""
    models, clusters = entries("models"), entries("clusters")
    if name is not None:
        _print_entry(name, as_json)
    elif as_json:
        listing = {"models": [_model_figures(load_model(entry)) for entry in models]}
        listing |= {"clusters": [_cluster_figures(load_cluster(entry)) for entry in clusters]}
        print_json(listing)
    else:
        # A pipe has no width: without this rich would cut the columns at 80.
        console = Console() if Console().is_terminal else Console(width=160)
        console.print(_model_table([load_model(entry) for entry in models]))
        console.print(_cluster_table([load_cluster(entry) for entry in clusters]))


def _print_entry(name: str, as_json: bool) -> None:
    models, clusters = entries("models"), entries("clusters")
    path = (models | clusters).get(name)
    if path is None:
        known = [*models, *clusters]
        message = f'"{name}" is neither a model nor a cluster of the catalog'
        raise SpecError([problem_at(Path(name), 1, "name", message, suggest_name(name, known))])
    if as_json:
        entry = load_model(name) if name in models else load_cluster(name)
        typer.echo(entry.model_dump_json(indent=2))
    else:
        typer.echo(path.read_text(encoding="utf-8"), nl=False)


def _model_figures(model: Model) -> dict[str, object]:
    return {
        "name": model.name,
        "parameters": count_parameters(model),
        "active_parameters": count_active_parameters(model),
        "layers": model.layers,
        "width": model.width,
        "experts": model.moe.experts if model.moe else 0,
        "source": model.source,
    }


def _cluster_figures(cluster: Cluster) -> dict[str, object]:
    return {
        "name": cluster.name,
        "chips": cluster.chips,
        "chip": cluster.chip.name,
        "memory": cluster.chip.memory,
        "levels": [level.model_dump() for level in cluster.levels],
        "source": cluster.source,
    }


def _model_table(models: list[Model]) -> Table:
    table = Table(title="Models", title_justify="left")
    table.add_column("name", no_wrap=True)
    for column in ("parameters", "active", "layers", "width", "experts"):
        table.add_column(column, justify="right", no_wrap=True)
    for model in sorted(models, key=count_parameters):
        total, active = count(count_parameters(model)), count(count_active_parameters(model))
        experts = f"{model.moe.top_k} of {model.moe.experts:,}" if model.moe else ""
        table.add_row(model.name, total, active if model.moe else "", str(model.layers), f"{model.width:,}", experts)
    return table


def _cluster_table(clusters: list[Cluster]) -> Table:
    table = Table(title="Clusters", title_justify="left")
    for column in ("name", "chips", "chip", "memory", "levels"):
        right = column in ("chips", "memory")
        table.add_column(column, justify="right" if right else "left", no_wrap=column != "levels")
    for cluster in sorted(clusters, key=lambda cluster: cluster.chips):
        levels = " · ".join(f"{level.fanout} × {level.name}" for level in cluster.levels)
        memory = f"{cluster.chip.memory / 1e9:.0f} GB"
        table.add_row(cluster.name, f"{cluster.chips:,}", cluster.chip.name, memory, levels)
    return table
