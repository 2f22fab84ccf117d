"""Rules inside the `[data]` of a recipe."""

from collections.abc import Iterator

from danlu.spec.load import ParsedSpec
from danlu.spec.mixture_weights import MAX_TOTAL_WEIGHT, integer_weights
from danlu.spec.problem import Problem
from danlu.spec.recipe import DataConfig, Recipe


def is_remote(shards: str) -> bool:
    """Whether shards are in an object store and not in a folder."""
    return "://" in shards


def sources_differ(recipe: ParsedSpec[Recipe]) -> Iterator[Problem]:
    """A dataset is named at most once in a mixture: named twice, an epoch would read it twice."""
    seen: dict[str, int] = {}
    for number, source in enumerate(recipe.value.data.sources):
        if source.shards in seen:
            yield recipe.problem(
                f"data.sources[{number}].shards",
                f'is "{source.shards}", which source {seen[source.shards]} names already',
                "name it once, with the sum of the weights",
            )
        seen.setdefault(source.shards, number)


def weights_fit_31_bits(recipe: ParsedSpec[Recipe]) -> Iterator[Problem]:
    """Weights are converted to integers, whose sum must stay within 31 bits."""
    sources = recipe.value.data.sources
    weights = [source.weight for source in sources]
    if sources and (total := sum(integer_weights(weights))) > MAX_TOTAL_WEIGHT:
        smallest = min(range(len(sources)), key=lambda number: weights[number])
        yield recipe.problem(
            f"data.sources[{smallest}].weight",
            f"is {weights[smallest]}, which with the others sums to {total:,} as integers; the limit is 2^31",
            "round the weights to fewer digits",
        )


def remote_has_cache(recipe: ParsedSpec[Recipe]) -> Iterator[Problem]:
    """Blocks from a store are cached on a local disk; without a store there is nothing to cache."""
    data = recipe.value.data
    remote = [source.shards for source in data.datasets if is_remote(source.shards)]
    if remote and not data.cache:
        yield recipe.problem(
            "data.cache",
            f"is missing, but {remote[0]} is read through a cache on a local disk",
            'cache = "/local/disk/danlu", and `cache_size` if it is not 16 GiB',
        )
    for name in ("cache", "options"):
        if not remote and getattr(data, name):
            yield recipe.problem(
                f"data.{name}", "is set, but no shards are in a store, so it would be ignored", "remove it"
            )


def remote_is_known(recipe: ParsedSpec[Recipe]) -> Iterator[Problem]:
    """Shards are in a folder or at a supported URL."""
    for key, shards in _named(recipe.value.data):
        scheme = shards.partition("://")[0]
        if is_remote(shards) and scheme not in ("s3", "memory"):
            yield recipe.problem(
                key,
                f'is "{shards}", but shards must be in a folder or at s3://',
                f'"s3://{shards.partition("://")[2]}"',
            )


def _named(data: DataConfig) -> Iterator[tuple[str, str]]:
    if data.shards:
        yield "data.shards", data.shards
    for number, source in enumerate(data.sources):
        yield f"data.sources[{number}].shards", source.shards


DATA_RULES = (sources_differ, weights_fit_31_bits, remote_has_cache, remote_is_known)
