"""Rules inside the `[data]` and the `[evaluation]` of a recipe."""

from collections.abc import Iterator

from danlu.spec.load import ParsedSpec
from danlu.spec.mixture_weights import MAX_TOTAL_WEIGHT, integer_weights
from danlu.spec.problem import Problem
from danlu.spec.recipe import EvaluationConfig, Recipe


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
    remote = [shards for _, shards in _named(recipe.value) if is_remote(shards)]
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
    for key, shards in _named(recipe.value):
        scheme = shards.partition("://")[0]
        if is_remote(shards) and scheme not in ("s3", "memory"):
            yield recipe.problem(
                key,
                f'is "{shards}", but shards must be in a folder or at s3://',
                f'"s3://{shards.partition("://")[2]}"',
            )


def evaluation_is_used(recipe: ParsedSpec[Recipe]) -> Iterator[Problem]:
    """Without held-out data or prompts there is nothing to evaluate or to continue."""
    evaluation = recipe.value.evaluation
    no_data, no_prompts = "`evaluation.data` names no data set", "`evaluation.prompts` has no prompt"
    data, prompts = 'data = [{ name = "held-out", shards = "…" }]', 'prompts = ["…"]'
    for name, needed, missing, remedy in (
        ("every", evaluation.data or evaluation.prompts, f"{no_data} and {no_prompts}", data),
        ("tokens", evaluation.data, no_data, data),
        ("sample_tokens", evaluation.prompts, no_prompts, prompts),
    ):
        if not needed and getattr(evaluation, name) != getattr(EvaluationConfig(), name):
            yield recipe.problem(f"evaluation.{name}", f"is set, but {missing}, so it would be ignored", remedy)
    if evaluation.data and evaluation.tokens < recipe.value.batch.length:
        yield recipe.problem(
            "evaluation.tokens",
            f"is {evaluation.tokens}, but one sequence has {recipe.value.batch.length} tokens",
            f"at least {recipe.value.batch.length}",
        )


def held_out_is_held_out(recipe: ParsedSpec[Recipe]) -> Iterator[Problem]:
    """A held-out data set has a name and shards of its own, and the run does not train on it."""
    trained = {source.shards for source in recipe.value.data.datasets}
    names: set[str] = set()
    for number, source in enumerate(recipe.value.evaluation.data):
        if source.shards in trained:
            yield recipe.problem(
                f"evaluation.data[{number}].shards",
                f'is "{source.shards}", which the run trains on, so its loss would not be of held-out data',
                "keep some documents out of the training data, and build shards of them alone",
            )
        if source.name in names:
            yield recipe.problem(
                f"evaluation.data[{number}].name",
                f'is "{source.name}", which an earlier data set has already',
                "a name of its own",
            )
        names.add(source.name)


def _named(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Every data set that a recipe names, by key."""
    if recipe.data.shards:
        yield "data.shards", recipe.data.shards
    for number, source in enumerate(recipe.data.sources):
        yield f"data.sources[{number}].shards", source.shards
    for number, held_out in enumerate(recipe.evaluation.data):
        yield f"evaluation.data[{number}].shards", held_out.shards


DATA_RULES = (
    sources_differ,
    weights_fit_31_bits,
    remote_has_cache,
    remote_is_known,
    evaluation_is_used,
    held_out_is_held_out,
)
