"""Paths of a recipe that hold wherever it is read."""

from pathlib import Path

from danlu.spec import Recipe
from danlu.spec.own_model import OwnModel


def with_absolute_paths(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with paths that hold wherever the workers are started."""

    def absolute(path: str) -> str:
        return str((folder / path).resolve())

    data = recipe.data
    resolved = data.model_copy(
        update={
            "shards": absolute(data.shards),
            "source": tuple(name if name == "python-stdlib" else absolute(name) for name in data.source),
            "tokenizer": data.tokenizer if data.tokenizer == "bytes" else absolute(data.tokenizer),
        }
    )
    weights = absolute(recipe.weights) if recipe.weights else ""
    model = recipe.model
    if isinstance(model, OwnModel):
        model = model.model_copy(update={"path": absolute(model.path)})
    return recipe.model_copy(update={"data": resolved, "weights": weights, "model": model})
