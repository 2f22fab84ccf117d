"""`danlu catalogue`: the models and clusters that come with Danlu."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from danlu.cost import active_parameters, parameters
from danlu.report.wording import count
from danlu.spec.catalogue import catalogue as entries
from danlu.spec.cluster import Cluster
from danlu.spec.load import load_cluster, load_model
from danlu.spec.model import Model
from danlu.spec.problem import SpecError, nearest, problem_at


def catalogue(
    name: Annotated[str | None, typer.Argument(help="Print this entry's file, to be redirected and edited.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print for machines.")] = False,
) -> None:
    """List the built-in models and clusters, or print one's TOML."""
    models, clusters = entries("models"), entries("clusters")
    if name is not None:
        _print_entry(name, as_json)
    elif as_json:
        answer = {"models": [_model_figures(load_model(entry)) for entry in models]}
        answer |= {"clusters": [_cluster_figures(load_cluster(entry)) for entry in clusters]}
        typer.echo(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        # A pipe has no width of its own: without this rich would cut the columns at 80.
        console = Console() if Console().is_terminal else Console(width=160)
        console.print(_model_table([load_model(entry) for entry in models]))
        console.print(_cluster_table([load_cluster(entry) for entry in clusters]))


def _print_entry(name: str, as_json: bool) -> None:
    models, clusters = entries("models"), entries("clusters")
    path = (models | clusters).get(name)
    if path is None:
        known = [*models, *clusters]
        message = f'"{name}" is neither a model nor a cluster of the catalogue'
        raise SpecError([problem_at(Path(name), 1, "name", message, nearest(name, known))])
    if as_json:
        entry = load_model(name) if name in models else load_cluster(name)
        typer.echo(entry.model_dump_json(indent=2))
    else:
        typer.echo(path.read_text(encoding="utf-8"), nl=False)


def _model_figures(model: Model) -> dict[str, object]:
    return {
        "name": model.name,
        "parameters": parameters(model),
        "active_parameters": active_parameters(model),
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
    for model in sorted(models, key=parameters):
        total, active = count(parameters(model)), count(active_parameters(model))
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
