"""Checks a recipe's custom model against its plan, before anything starts."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from danlu.spec import SpecError, toml
from danlu.spec.check import RunSpec
from danlu.spec.custom_model import CustomModel
from danlu.spec.load import ParsedSpec
from danlu.spec.problem import format_key, format_value, problem_at
from danlu.spec.recipe_paths import is_relative_path
from danlu.spec.text import one_line

_IN_RECIPE = ("model", "precision", "data")


def check_custom_model(spec: RunSpec) -> None:
    """Build the module without memory and run it once; what it lacks raises `SpecError` at its setting.

    A model that is described by its shape is checked elsewhere, without torch.
    """
    if not isinstance(spec.recipe.model, CustomModel):
        return
    check_argument_paths(spec.recipe_document)
    from danlu.framework.custom.adapter import CustomModelAdapter
    from danlu.framework.custom.construct import CustomModelError

    try:
        CustomModelAdapter(spec.recipe, spec.plan)
    except CustomModelError as error:
        in_recipe = error.key.startswith(_IN_RECIPE)
        document = spec.recipe_document if in_recipe else spec.plan_document
        raise SpecError(
            [ParsedSpec(spec.recipe, document).problem(error.key, error.message, error.suggestion)]
        ) from error


def factory_source(model: CustomModel) -> str:
    """Which code a factory's name refers to, found without running it."""
    name = model.factory.partition(":")[0]
    top = Path(model.path) / name.partition(".")[0]
    files = [file for file in (top.with_suffix(".py"), top / "__init__.py") if file.is_file()]
    return one_line(f"{name} ({files[0] if files else f'an installed package, unless {model.path} holds it'})")


def check_argument_paths(document: toml.TomlDocument) -> None:
    """Paths among the arguments of a factory are relative to the recipe, as all paths of a file are.

    They begin with `./` or `../`. If that changes the meaning of an older recipe, it is an error or a warning.
    """
    arguments = document.values.get("model", {}).get("arguments", {})
    problems = []
    for key, value in _texts(arguments, ("model", "arguments")):
        here, beside = Path(value), document.path.parent / value
        if is_relative_path(value):
            if not beside.exists() and here.exists() and here.absolute() != beside.absolute():
                message = f"is {format_value(value)}, a path relative to the recipe, but there is no {beside}"
                hint = f"an absolute path, if {here.absolute()} is meant"
                problems.append(problem_at(*document.location(key), format_key(key), message, hint))
        elif _may_be_path(value) and (here.exists() or beside.exists()):
            message = (
                f"{format_value(value)} is passed unchanged, and a path would be relative to the working directory"
            )
            hint = f'"./{value}" is relative to the recipe'
            sys.stderr.write(f"warning: {problem_at(*document.location(key), format_key(key), message, hint)}\n")
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
