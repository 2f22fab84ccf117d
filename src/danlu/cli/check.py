"""`danlu check`: every contradiction of the files of a run, before it starts."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from danlu.cli.own_model import check_own_model
from danlu.cli.paths import with_absolute_paths
from danlu.cost import active_parameters, parameters
from danlu.report.wording import count
from danlu.spec.check import Checked, check_all
from danlu.spec.model import Model
from danlu.spec.problem import Problem, SpecError


def check(
    recipe: Annotated[Path, typer.Argument(help="What to train.", metavar="RECIPE.toml")],
    cluster: Annotated[str | None, typer.Option(help="A cluster of the catalogue, or its file.")] = None,
    plan: Annotated[Path | None, typer.Option(help="How it runs; one rank if left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print for machines.")] = False,
) -> None:
    """Hold a recipe, a plan and a cluster against each other, and report every problem with its line."""
    try:
        checked = check_all(recipe, plan, cluster)
        resolved = with_absolute_paths(checked.recipe, recipe.parent)
        check_own_model(resolved, recipe, checked.plan, plan)
    except SpecError as error:
        if as_json:
            _print_json(error.problems)
        else:
            _print_problems(error.problems)
        raise typer.Exit(2) from None
    if as_json:
        _print_json([], checked)
    else:
        _lines(error=False).print(_summary(recipe, checked))


def _lines(*, error: bool) -> Console:
    """A console that never breaks a line: a terminal wraps by itself, and a pipe wants paths in one piece."""
    return Console(stderr=error, soft_wrap=True, highlight=False)


def _print_problems(problems: list[Problem]) -> None:
    console = _lines(error=True)
    for problem in problems:
        place = Text.assemble((f"{problem.file}:{problem.line}", "bold"), ": ", (problem.key, "cyan"), ": ")
        console.print(place + Text(problem.message))
        if problem.suggestion:
            console.print(Text(f"    → {problem.suggestion}", "green"))
    files = len({problem.file for problem in problems})
    closing = f"{len(problems)} problem{'s' * (len(problems) > 1)} in {files} file{'s' * (files > 1)}"
    console.print(Text(closing, "bold red"))


def _summary(path: Path, checked: Checked) -> Text:
    """One line: what was checked."""
    model, size = checked.recipe.model, "a module of its own"
    if isinstance(model, Model):
        size = f"{count(parameters(model))} parameters"
        if model.moe:
            size += f", {count(active_parameters(model))} active"
    world = checked.plan.degrees.world
    ranks = f"{world:,} rank{'s' * (world > 1)}"
    if checked.cluster:
        ranks += f" of the {checked.cluster.chips:,} chips of {checked.cluster.name}"
    return Text.assemble((f"{path}", "bold"), ": ", ("no problems", "green"), f": {model.name}, {size}, {ranks}")


def _print_json(problems: list[Problem], checked: Checked | None = None) -> None:
    answer: dict[str, object] = {"problems": [problem.model_dump() for problem in problems]}
    if checked:
        model = checked.recipe.model
        answer |= {
            "model": model.name,
            "parameters": parameters(model) if isinstance(model, Model) else None,
            "active_parameters": active_parameters(model) if isinstance(model, Model) else None,
            "world": checked.plan.degrees.world,
            "chips": checked.cluster.chips if checked.cluster else None,
        }
    typer.echo(json.dumps(answer, indent=2, ensure_ascii=False))
