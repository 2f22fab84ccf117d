"""From a recipe to a run folder that workers can start from: everything checked, data built, files written."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import typer

from danlu.cli.custom_model import check_custom_model
from danlu.cli.data import build_with_progress
from danlu.cli.precision_warning import warn_slow_precision
from danlu.cli.recipe_paths import resolve_recipe_paths
from danlu.spec import Model, Recipe, RunFolder, SpecError, toml
from danlu.spec.check import RunSpec, load_run_spec
from danlu.spec.load import ParsedSpec, load_model
from danlu.spec.names import NAME_RULE, is_name, sanitize_name
from danlu.spec.plan import fully_sharded_plan
from danlu.spec.problem import format_key, format_value, problem_at
from danlu.spec.recipe import DataSource
from danlu.spec.rules.data import is_remote
from danlu.storage import run_lock
from danlu.storage.access import set_umask
from danlu.storage.data.dataset_index import INDEX_FILE
from danlu.storage.data.mixture_dataset import MixtureDataset
from danlu.storage.data.open_shards import open_shards
from danlu.storage.data.tokenizer import Tokenizer, open_tokenizer
from danlu.storage.run_lock import RunError, RunLock

DEFAULT_RUNS_DIR = Path("runs")
"""Folder of the runs, relative to the working directory."""


def prepare_unlocked_run(
    recipe: Path, plan: Path | None, cluster: str | None, name: str | None, world: int
) -> RunFolder:
    """An unlocked run folder, written by `prepare_locked_run`."""
    run, lock = prepare_locked_run(recipe, plan, cluster, name, world)
    lock.release()
    return run


def prepare_locked_run(
    recipe: Path, plan: Path | None, cluster: str | None, name: str | None, world: int, settings: Sequence[str] = ()
) -> tuple[RunFolder, RunLock]:
    """Check a run, build its data if necessary, acquire its lock and write its folder.

    Raises `SpecError` before anything is written. Files that this process writes afterwards have the permissions of the
    recipe's `access`. `settings` such as `steps=10` override the recipe.
    """
    checked = load_run_spec(recipe, plan, cluster, fully_sharded_plan(world), settings)
    choose_new_run_folder(name, checked.recipe.name)  # an invalid name is refused before anything is built
    warn_slow_precision(checked)
    resolved = resolve_recipe_paths(checked.recipe, recipe.parent)
    check_custom_model(resolved, recipe, checked.plan, plan)
    check_weights(recipe, resolved)
    ensure_dataset(recipe, resolved)
    try:
        DEFAULT_RUNS_DIR.mkdir(exist_ok=True)  # with default permissions; only the run folders are private
        set_umask(checked.recipe.access)
        run = _make_run_folder(name, checked.recipe.name)
        lock = run_lock.acquire(run)
        _write_spec_files(run, RunSpec(resolved, checked.plan, checked.cluster))
    except OSError as error:
        raise RunError(
            f"{DEFAULT_RUNS_DIR.absolute()} cannot be written to: {error.strerror}; nothing was started"
        ) from None
    return run, lock


def choose_new_run_folder(name: str | None, recipe_name: str) -> RunFolder:
    """A folder that does not exist yet: the requested name, or the recipe's with a number appended."""
    if name is None:
        names = (recipe_name if number == 1 else f"{recipe_name}-{number}" for number in count(1))
        return RunFolder(next(path for each in names if not (path := DEFAULT_RUNS_DIR.absolute() / each).exists()))
    if not is_name(name):
        message = f"is {format_value(name)}, but must be {NAME_RULE}"
        raise SpecError([problem_at(DEFAULT_RUNS_DIR, 1, "--name", message, f"--name {sanitize_name(name)}")])
    path = DEFAULT_RUNS_DIR.absolute() / name
    if path.exists():
        message = f"is the name of a run that exists: {path}"
        raise SpecError([problem_at(path, 1, "name", message, f"another name, or --resume {name}")])
    return RunFolder(path)


def _make_run_folder(name: str | None, recipe_name: str) -> RunFolder:
    """Create the folder; the next one if another process was faster."""
    while True:
        run = choose_new_run_folder(name, recipe_name)
        try:
            run.path.mkdir()
        except FileExistsError:
            continue
        return run


def ensure_dataset(path: Path, recipe: Recipe) -> None:
    """Build the recipe's token shards if they do not exist yet, and check that the model can read them."""
    data, document = recipe.data, toml.read(path)
    tokenizer = open_tokenizer(data.tokenizer)
    if tokenizer.vocabulary > recipe.model.vocabulary:
        line = document.line(("model", "vocabulary"))
        message = f"is {recipe.model.vocabulary}, but the tokenizer has token ids up to {tokenizer.vocabulary - 1}"
        raise SpecError([problem_at(path, line, "model.vocabulary", message, f"at least {tokenizer.vocabulary}")])
    for number, source in enumerate(data.datasets):
        key_path = ("data", "sources", number, "shards") if data.sources else ("data", "shards")
        _ensure_source(ParsedSpec(recipe, document), key_path, source, tokenizer)
    # raises if it has not one sample
    MixtureDataset.from_recipe(data, recipe.batch.length, recipe.seed, on_warning=_warn)


def _ensure_source(
    recipe: ParsedSpec[Recipe], key_path: toml.KeyPath, source: DataSource, tokenizer: Tokenizer
) -> None:
    """Build one data set of the recipe if it does not exist yet, and check that it has the recipe's tokenizer."""
    if not is_remote(source.shards) and not (Path(source.shards) / INDEX_FILE).exists():
        if not source.source:
            message = f'"{source.shards}" is not a data set'
            hint = f"danlu data build SOURCE… -o {source.shards}, or add a `source` to it"
            raise SpecError([recipe.problem(format_key(key_path), message, hint)])
        typer.echo(f"building token shards in {source.shards} from {', '.join(source.source)}")
        build_with_progress(list(source.source), Path(source.shards), tokenizer)
    index = open_shards(source.shards, recipe.value.data, check_sizes=False, on_warning=_warn).index
    if index.tokenizer != tokenizer.name:
        message = f'was built with tokenizer "{index.tokenizer}", but the recipe says "{tokenizer.name}"'
        hint = "another folder, or build it again with `danlu data build … --force`"
        raise SpecError([recipe.problem(format_key(key_path), message, hint)])


def _warn(message: str) -> None:
    typer.echo(f"warning: {message}", err=True)


def check_weights(path: Path, recipe: Recipe) -> None:
    """Check the initial weights of a run, if there are any, against its model."""
    if not recipe.weights:
        return
    from danlu.framework.weights import open_weights

    folder, document, model = Path(recipe.weights), toml.read(path), recipe.model
    if isinstance(model, Model):
        _check_against_model_file(path, document, model, folder)
    open_weights(folder, model)


def _check_against_model_file(path: Path, document: toml.TomlDocument, model: Model, folder: Path) -> None:
    from danlu.framework.hf import MODEL_FILE, differing_fields

    file = folder / MODEL_FILE
    imported = load_model(str(file))
    problems = [
        problem_at(
            path,
            document.line(("model", field)),
            f"model.{field}",
            f"is {format_value(getattr(model, field))}, but {format_value(getattr(imported, field))} in {file}",
            "use the value that the weights were trained with",
        )
        for field in differing_fields(model, imported)
    ]
    if problems:
        raise SpecError(problems)


def _write_spec_files(run: RunFolder, checked: RunSpec) -> None:
    run.recipe.write_text(toml.dumps(checked.recipe))
    run.plan.write_text(toml.dumps(checked.plan))
    if checked.cluster is not None:
        run.cluster.write_text(toml.dumps(checked.cluster))
