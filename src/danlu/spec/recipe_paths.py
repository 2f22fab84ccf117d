"""Make the paths of a recipe absolute, so that they are valid from any working directory."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from danlu.spec.custom_model import CustomModel
from danlu.spec.recipe import Recipe, ShardSource

S = TypeVar("S", bound=ShardSource)


def is_relative_path(text: str) -> bool:
    """Whether a string argument of a model is a path relative to the recipe: `./x`, `../x`, `.` or `..`."""
    return text in (".", "..") or text.startswith(("./", "../"))


def _resolve_arguments(value: Any, absolute: Callable[[str], str]) -> Any:
    """The arguments of a model with absolute paths."""
    if isinstance(value, str):
        return absolute(value) if is_relative_path(value) and "\0" not in value else value
    if isinstance(value, dict):
        return {key: _resolve_arguments(inner, absolute) for key, inner in value.items()}
    return [_resolve_arguments(inner, absolute) for inner in value] if isinstance(value, list) else value


def resolve_recipe_paths(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with paths that are valid wherever the workers are started."""

    def absolute(path: str) -> str:
        return str((folder / Path(path).expanduser()).resolve())

    def location(where: str) -> str:
        return where if "://" in where or not where else absolute(where)

    def texts(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name if name == "python-stdlib" else absolute(name) for name in names)

    def resolved_sources(sources: Iterable[S]) -> tuple[S, ...]:
        return tuple(
            source.model_copy(update={"shards": location(source.shards), "source": texts(source.source)})
            for source in sources
        )

    data = recipe.data
    resolved = data.model_copy(
        update={
            "shards": location(data.shards),
            "sources": resolved_sources(data.sources),
            "source": texts(data.source),
            "tokenizer": data.tokenizer if data.tokenizer == "bytes" else absolute(data.tokenizer),
            "cache": absolute(data.cache) if data.cache else "",
        }
    )
    saves = recipe.checkpoint
    kept = saves.model_copy(update={"store": location(saves.store), "near": location(saves.near)})
    held_out = recipe.evaluation.model_copy(update={"data": resolved_sources(recipe.evaluation.data)})
    weights = absolute(recipe.weights) if recipe.weights else ""
    model = recipe.model
    if isinstance(model, CustomModel):
        arguments = _resolve_arguments(model.arguments, absolute)
        model = model.model_copy(update={"path": absolute(model.path), "arguments": arguments})
    return recipe.model_copy(
        update={"data": resolved, "checkpoint": kept, "evaluation": held_out, "weights": weights, "model": model}
    )
