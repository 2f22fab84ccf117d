"""The data of a run: built if it does not exist yet, and checked against the recipe."""

from pathlib import Path

from danlu.report.progress_bar import progress_bar
from danlu.report.terminal import Console, print_warning
from danlu.spec import Recipe, SpecError, toml
from danlu.spec.load import ParsedSpec
from danlu.spec.problem import format_key, problem_at
from danlu.spec.recipe import ShardSource
from danlu.spec.rules.data import is_remote
from danlu.storage.data.build import BuildResult, build_dataset
from danlu.storage.data.dataset_index import INDEX_FILE, DatasetIndex, read_index
from danlu.storage.data.mixture_dataset import MixtureDataset
from danlu.storage.data.open_shards import open_shards
from danlu.storage.data.tokenizer import Tokenizer, open_tokenizer


def ensure_dataset(recipe: ParsedSpec[Recipe], console: Console) -> None:
    """Build the recipe's token shards if they do not exist yet, and check that the model can read them."""
    value, data = recipe.value, recipe.value.data
    tokenizer = open_tokenizer(data.tokenizer)
    if tokenizer.vocabulary > value.model.vocabulary:
        message = f"is {value.model.vocabulary}, but the tokenizer has token ids up to {tokenizer.vocabulary - 1}"
        raise SpecError([recipe.problem("model.vocabulary", message, f"at least {tokenizer.vocabulary}")])
    for number, source in enumerate(data.datasets):
        key_path = ("data", "sources", number, "shards") if data.sources else ("data", "shards")
        _ensure_source(recipe, key_path, source, tokenizer, console)
    ensure_held_out(recipe, console)
    _check_prompts(recipe, tokenizer)
    # raises if it has not one sample
    MixtureDataset.from_recipe(data, value.batch.length, value.seed, on_warning=print_warning)


def _check_prompts(recipe: ParsedSpec[Recipe], tokenizer: Tokenizer) -> None:
    """Every prompt of the evaluation leaves room for a token in a sequence."""
    length = recipe.value.batch.length
    for number, prompt in enumerate(recipe.value.evaluation.prompts):
        if (tokens := len(tokenizer.encode(prompt))) >= length:
            message = f"has {tokens:,} tokens, but a sequence has {length:,}, and must have one more than the prompt"
            raise SpecError([recipe.problem(f"evaluation.prompts[{number}]", message, "a shorter prompt")])


def ensure_held_out(recipe: ParsedSpec[Recipe], console: Console) -> None:
    """The same for the recipe's held-out data sets."""
    tokenizer = open_tokenizer(recipe.value.data.tokenizer)
    for number, held_out in enumerate(recipe.value.evaluation.data):
        _ensure_source(recipe, ("evaluation", "data", number, "shards"), held_out, tokenizer, console)


def _ensure_source(
    recipe: ParsedSpec[Recipe], key_path: toml.KeyPath, source: ShardSource, tokenizer: Tokenizer, console: Console
) -> None:
    """Build one data set of the recipe if it does not exist yet, and check that it has the recipe's tokenizer."""
    folder = Path(source.shards)
    if not is_remote(source.shards) and not (folder / INDEX_FILE).exists():
        if not source.source:
            message = f'"{source.shards}" is not a data set'
            hint = f"danlu data build SOURCE… -o {source.shards}, or add a `source` to it"
            raise SpecError([recipe.problem(format_key(key_path), message, hint)])
        console.print_line(f"building token shards in {folder} from {', '.join(source.source)}")
        with progress_bar("tokens") as on_progress:
            built = build_dataset(list(source.source), folder, tokenizer, on_progress)
        for line in (*skipped_lines(built), build_line(folder, built)):
            console.print_line(line)
    index = open_shards(source.shards, recipe.value.data, check_sizes=False, on_warning=print_warning).index
    if index.tokenizer != tokenizer.name:
        message = f'was built with tokenizer "{index.tokenizer}", but the recipe says "{tokenizer.name}"'
        hint = "another folder, or build it again with `danlu data build … --force`"
        raise SpecError([recipe.problem(format_key(key_path), message, hint)])


def skipped_lines(built: BuildResult) -> list[str]:
    """What a build skipped, with examples."""
    counts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(built.skipped.items()))
    examples = [f"  {each.file}:{each.line}: {each.key}: {each.message}" for each in built.skipped_examples]
    return [*([f"skipped: {counts}"] if counts else []), *examples]


def build_line(folder: Path, built: BuildResult) -> str:
    """A build in one line."""
    index = built.index
    return (
        f"{folder}: {index.documents:,} documents, {index.tokens:,} tokens, {shard_count(index)}"
        f" in {built.seconds:.1f} s, unigram loss {index.unigram_loss:.4f}"
        + (f", the loss counts {index.counted:,} tokens of answers" if index.has_loss_mask else "")
        + (f", version {len(index.editions) - 1}" if len(index.editions) > 1 else "")
        + (f" ({built.resumed_shards} shards reused from an interrupted build)" if built.resumed_shards else "")
    )


def shard_count(index: DatasetIndex) -> str:
    """Its number of shards, in words."""
    return f"{len(index.shards):,} shard{'s' if len(index.shards) > 1 else ''}"


def open_run_tokenizer(recipe: Recipe) -> tuple[Tokenizer, int]:
    """The tokenizer of a run, and the token that ends a document of its data.

    One that changed since the data was built is an error; a warning says so if the data is out of reach.
    """
    tokenizer = open_tokenizer(recipe.data.tokenizer)
    path = Path(recipe.data.tokenizer)
    if tokenizer.vocabulary > recipe.model.vocabulary:
        message = f"has token ids up to {tokenizer.vocabulary - 1}, but `model.vocabulary` is {recipe.model.vocabulary}"
        raise SpecError([problem_at(path, 1, "tokenizer", message, "the tokenizer that the run was trained with")])
    folders = [source.shards for source in recipe.data.datasets if not is_remote(source.shards)]
    indexes = {folder: read_index(Path(folder)) for folder in folders if (Path(folder) / INDEX_FILE).is_file()}
    for folder, index in indexes.items():
        if index.tokenizer != tokenizer.name:
            message = f'is "{tokenizer.name}", but {folder} was built with "{index.tokenizer}"'
            raise SpecError([problem_at(path, 1, "tokenizer", message, "restore the file as it was")])
    if not indexes:
        print_warning("the run's data is not here, so that its tokenizer cannot be compared with the recipe's")
    return tokenizer, next((index.end_of_text for index in indexes.values()), tokenizer.end_of_text)
