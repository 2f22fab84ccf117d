"""Checks a recipe's custom model against its plan, before anything starts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from danlu.cli.recipe_paths import is_relative_path
from danlu.spec import Plan, Recipe, SpecError, toml
from danlu.spec.custom_model import CustomModel
from danlu.spec.load import read_document
from danlu.spec.problem import format_key, format_value, problem_at
from danlu.spec.text import one_line

_IN_RECIPE = ("model", "precision")


def check_custom_model(recipe: Recipe, recipe_file: Path, plan: Plan, plan_file: Path | None) -> None:
    """Build the module without memory and run it once; what it lacks raises `SpecError` at its setting.

    A model that is described by its shape is checked elsewhere, without torch.
    """
    if not isinstance(recipe.model, CustomModel):
        return
    check_argument_paths(recipe_file)
    from danlu.framework.custom.adapter import CustomModelAdapter
    from danlu.framework.custom.construct import CustomModelError

    try:
        CustomModelAdapter(recipe, plan)
    except CustomModelError as error:
        in_recipe = error.key.startswith(_IN_RECIPE)
        file = recipe_file if in_recipe else plan_file or Path("plan (default)")
        key = tuple(error.key.replace("]", "").replace("[", ".").split("."))
        line = read_document(file).line(key) if in_recipe or plan_file else 1
        raise SpecError([problem_at(file, line, error.key, error.message, error.suggestion)]) from error


def factory_source(model: CustomModel) -> str:
    """Which code a factory's name refers to, found without running it."""
    name = model.factory.partition(":")[0]
    top = Path(model.path) / name.partition(".")[0]
    files = [file for file in (top.with_suffix(".py"), top / "__init__.py") if file.is_file()]
    return one_line(f"{name} ({files[0] if files else f'an installed package, unless {model.path} holds it'})")


def check_argument_paths(recipe_file: Path) -> None:
    """Paths among the arguments of a factory are relative to the recipe, as all paths of a file are.

    They begin with `./` or `../`. If that changes the meaning of an older recipe, it is an error or a warning.
    """
    document = read_document(recipe_file)
    arguments = document.values["model"].get("arguments", {})
    problems = []
    for key, value in _texts(arguments, ("model", "arguments")):
        here, beside = Path(value), recipe_file.parent / value
        if is_relative_path(value):
            if not beside.exists() and here.exists() and here.absolute() != beside.absolute():
                message = f"is {format_value(value)}, a path relative to the recipe, but there is no {beside}"
                hint = f"an absolute path, if {here.absolute()} is meant"
                problems.append(problem_at(recipe_file, document.line(key), format_key(key), message, hint))
        elif _may_be_path(value) and (here.exists() or beside.exists()):
            message = (
                f"{format_value(value)} is passed unchanged, and a path would be relative to the working directory"
            )
            hint = f'"./{value}" is relative to the recipe'
            typer.echo(
                f"warning: {problem_at(recipe_file, document.line(key), format_key(key), message, hint)}", err=True
            )
    if problems:
        raise SpecError(problems)


def _may_be_path(value: str) -> bool:
    return bool(value) and len(value) < 1024 and "\0" not in value and not Path(value).is_absolute()


def _texts(value: Any, key: toml.KeyPath) -> Iterator[tuple[toml.KeyPath, str]]:
    """Every string in a value, with its key path."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict | list):
        for part, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(inner, (*key, part))
