"""Rules inside the `[data]` of a recipe."""

from collections.abc import Iterator

from danlu.spec.load import Sourced
from danlu.spec.mixing import LARGEST_TOTAL, whole_weights
from danlu.spec.problem import Problem
from danlu.spec.recipe import Data, Recipe


def is_remote(shards: str) -> bool:
    """Whether shards lie in a store and not in a folder."""
    return "://" in shards


def sources_differ(recipe: Sourced[Recipe]) -> Iterator[Problem]:
    """A data set is one source of a mixture at most: named twice, an epoch would read it twice."""
    seen: dict[str, int] = {}
    for number, part in enumerate(recipe.value.data.sources):
        if part.shards in seen:
            yield recipe.problem(
                f"data.sources[{number}].shards",
                f'is "{part.shards}", which source {seen[part.shards]} names already',
                "name it once, with the sum of the weights",
            )
        seen.setdefault(part.shards, number)


def weights_are_plain(recipe: Sourced[Recipe]) -> Iterator[Problem]:
    """Weights are dealt as whole numbers, whose sum must stay within 31 bits."""
    parts = recipe.value.data.sources
    weights = [part.weight for part in parts]
    if parts and (total := sum(whole_weights(weights))) > LARGEST_TOTAL:
        smallest = min(range(len(parts)), key=lambda number: weights[number])
        yield recipe.problem(
            f"data.sources[{smallest}].weight",
            f"is {weights[smallest]}, which with the others makes {total:,} parts, but 2^31 is the most",
            "round the weights to fewer digits",
        )


def remote_has_cache(recipe: Sourced[Recipe]) -> Iterator[Problem]:
    """Blocks from a store are kept on a local disk; without a store there is nothing to keep."""
    data = recipe.value.data
    remote = [part.shards for part in data.parts if is_remote(part.shards)]
    if remote and not data.cache:
        yield recipe.problem(
            "data.cache",
            f"is missing, but {remote[0]} is read through a cache on a local disk",
            'cache = "/local/disk/danlu", and `cache_size` if 16 GiB is not right',
        )
    for name in ("cache", "options"):
        if not remote and getattr(data, name):
            yield recipe.problem(
                f"data.{name}", "is set, but no shards are in a store, so that it would be ignored", "remove it"
            )


def remote_is_known(recipe: Sourced[Recipe]) -> Iterator[Problem]:
    """Shards lie in a folder or behind an address that can be opened."""
    for key, shards in _named(recipe.value.data):
        scheme = shards.partition("://")[0]
        if is_remote(shards) and scheme not in ("s3", "memory"):
            yield recipe.problem(
                key, f'is "{shards}", but shards lie in a folder or at s3://', f'"s3://{shards.partition("://")[2]}"'
            )


def _named(data: Data) -> Iterator[tuple[str, str]]:
    if data.shards:
        yield "data.shards", data.shards
    for number, part in enumerate(data.sources):
        yield f"data.sources[{number}].shards", part.shards


DATA_RULES = (sources_differ, weights_are_plain, remote_has_cache, remote_is_known)
