"""A recipe's own module held against its plan, before anything starts."""

from pathlib import Path

from danlu.spec import Plan, Recipe, SpecError
from danlu.spec.load import read_document
from danlu.spec.own_model import OwnModel
from danlu.spec.problem import problem_at

_IN_RECIPE = ("model", "precision")


def check_own_model(recipe: Recipe, recipe_file: Path, plan: Plan, plan_file: Path | None) -> None:
    """Make the module without memory and run it once; what it does not offer raises `SpecError` at its setting.

    A model that is described by its shape has been checked by then, and needs no torch for it.
    """
    if not isinstance(recipe.model, OwnModel):
        return
    from danlu.framework.own.blueprint import BroughtModel
    from danlu.framework.own.factory import OwnModelError

    try:
        BroughtModel(recipe, plan)
    except OwnModelError as error:
        in_recipe = error.key.startswith(_IN_RECIPE)
        file = recipe_file if in_recipe else plan_file or Path("plan (default)")
        key = tuple(error.key.replace("]", "").replace("[", ".").split("."))
        line = read_document(file).line(key) if in_recipe or plan_file else 1
        raise SpecError([problem_at(file, line, error.key, error.message, error.suggestion)]) from error
