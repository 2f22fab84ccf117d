"""`danlu check`: checks the files of a run for contradictions, before it starts."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from danlu.cli.json_output import print_json
from danlu.cost import count_active_parameters, count_parameters
from danlu.framework.custom.check import check_custom_model, factory_source
from danlu.report.formatting import count
from danlu.report.precision_text import slow_precision_note
from danlu.report.terminal import Console
from danlu.runs.prepare import warn_slow_precision
from danlu.spec.check import RunSpec, load_run_spec
from danlu.spec.custom_model import CustomModel
from danlu.spec.model import Model
from danlu.spec.problem import Problem, SpecError


def check(
    recipe: Annotated[Path, typer.Argument(help="What to train.", metavar="RECIPE.toml")],
    cluster: Annotated[str | None, typer.Option(help="A cluster of the catalog, or its file.")] = None,
    plan: Annotated[Path | None, typer.Option(help="How it runs; one rank if omitted.")] = None,
    do_import: Annotated[
        bool,
        typer.Option(
            "--import/--no-import",
            help="Import and run the code of a custom model to check it against the plan, or skip that.",
        ),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a recipe, a plan and a cluster for contradictions, and report every problem with its line."""
    try:
        checked = load_run_spec(recipe, plan, cluster)
        not_checked = _check_code(checked, do_import)
    except SpecError as error:
        if as_json:
            _print_json(error.problems)
        else:
            _print_problems(error.problems)
        raise typer.Exit(2) from None
    if as_json:
        _print_json([], checked, not_checked)
    else:
        _unwrapped_console(error=False).print(_summary(recipe, checked))
        warn_slow_precision(checked)
        if not_checked:
            _unwrapped_console(error=False).print(Text(f"not checked: {not_checked}", "yellow"))


def _check_code(checked: RunSpec, do_import: bool) -> str:
    """Check a custom model against the plan, printing first which code will run; returns what was not checked."""
    if not isinstance(checked.recipe.model, CustomModel):
        return ""
    code = factory_source(checked.recipe.model)
    if not do_import:
        return f"the model itself, because {code} was not imported"
    typer.echo(f"imports and runs {code}; --no-import checks without", err=True)
    check_custom_model(checked)
    return ""


def _unwrapped_console(*, error: bool) -> Console:
    """A console that never breaks a line: a terminal wraps by itself, and in a pipe paths must stay intact."""
    return Console(stderr=error, soft_wrap=True, highlight=False)


def _print_problems(problems: list[Problem]) -> None:
    console = _unwrapped_console(error=True)
    for problem in problems:
        location = Text.assemble((f"{problem.file}:{problem.line}", "bold"), ": ", (problem.key, "cyan"), ": ")
        console.print(location + Text(problem.message))
        if problem.suggestion:
            console.print(Text(f"    → {problem.suggestion}", "green"))
    files = len({problem.file for problem in problems})
    closing = f"{len(problems)} problem{'s' * (len(problems) > 1)} in {files} file{'s' * (files > 1)}"
    console.print(Text(closing, "bold red"))


def _summary(path: Path, checked: RunSpec) -> Text:
    """One line: what was checked."""
    model, size = checked.recipe.model, "custom module"
    if isinstance(model, Model):
        size = f"{count(count_parameters(model))} parameters"
        if model.moe:
            size += f", {count(count_active_parameters(model))} active"
    world = checked.plan.degrees.world
    ranks = f"{world:,} rank{'s' * (world > 1)}"
    if checked.cluster:
        ranks += f" of the {checked.cluster.chips:,} chips of {checked.cluster.name}"
    precision = checked.recipe.precision.label
    return Text.assemble(
        (f"{path}", "bold"), ": ", ("no problems", "green"), f": {model.name}, {size}, {precision}, {ranks}"
    )


def _print_json(problems: list[Problem], checked: RunSpec | None = None, not_checked: str = "") -> None:
    report: dict[str, object] = {"problems": [problem.model_dump() for problem in problems]}
    if checked:
        model = checked.recipe.model
        note = slow_precision_note(checked.recipe, checked.plan, checked.cluster)
        report |= {
            "model": model.name,
            "parameters": count_parameters(model) if isinstance(model, Model) else None,
            "active_parameters": count_active_parameters(model) if isinstance(model, Model) else None,
            "precision": checked.recipe.precision.label,
            "warnings": [note] if note else [],
            "world": checked.plan.degrees.world,
            "chips": checked.cluster.chips if checked.cluster else None,
            "not_checked": not_checked or None,
        }
    print_json(report)
