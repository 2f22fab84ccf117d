"""Paths of a recipe that hold wherever it is read."""

from pathlib import Path

from danlu.spec import Recipe
from danlu.spec.own_model import OwnModel


def with_absolute_paths(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with paths that hold wherever the workers are started."""

    def absolute(path: str) -> str:
        return str((folder / Path(path).expanduser()).resolve())

    def place(where: str) -> str:
        return where if "://" in where or not where else absolute(where)

    def texts(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name if name == "python-stdlib" else absolute(name) for name in names)

    data = recipe.data
    parts = tuple(
        part.model_copy(update={"shards": place(part.shards), "source": texts(part.source)}) for part in data.sources
    )
    resolved = data.model_copy(
        update={
            "shards": place(data.shards),
            "sources": parts,
            "source": texts(data.source),
            "tokenizer": data.tokenizer if data.tokenizer == "bytes" else absolute(data.tokenizer),
            "cache": absolute(data.cache) if data.cache else "",
        }
    )
    saves = recipe.checkpoint
    kept = saves.model_copy(update={"store": place(saves.store), "near": place(saves.near)})
    weights = absolute(recipe.weights) if recipe.weights else ""
    model = recipe.model
    if isinstance(model, OwnModel):
        model = model.model_copy(update={"path": absolute(model.path)})
    return recipe.model_copy(update={"data": resolved, "checkpoint": kept, "weights": weights, "model": model})
