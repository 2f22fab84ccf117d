"""From a recipe to a run's folder that workers can start from: everything checked, data built, files written."""

from itertools import count
from pathlib import Path

import typer

from danlu.cli.data import build_with_progress
from danlu.cli.own_model import check_own_model
from danlu.cli.paths import with_absolute_paths
from danlu.spec import Model, Recipe, RunFolder, SpecError, toml
from danlu.spec.check import Checked, check_all
from danlu.spec.load import Sourced, load_model
from danlu.spec.plan import fully_sharded
from danlu.spec.problem import dotted, problem_at, shown
from danlu.spec.recipe import DataSource
from danlu.spec.rules.data import is_remote
from danlu.storage.index import INDEX
from danlu.storage.open_shards import open_shards
from danlu.storage.tokenizer import Tokenizer, open_tokenizer
from danlu.storage.training_data import TrainingData

RUNS = Path("runs")
"""Where runs are kept, in the folder a command is started from."""


def prepare_run(recipe: Path, plan: Path | None, cluster: str | None, name: str | None, world: int) -> RunFolder:
    """Check a run, build its data if need be, and write its folder; raises `SpecError` before anything is written."""
    checked = check_all(recipe, plan, cluster, default=fully_sharded(world))
    choose_folder(name, checked.recipe.name)  # a wrong name is refused before anything is built for it
    resolved = with_absolute_paths(checked.recipe, recipe.parent)
    check_own_model(resolved, recipe, checked.plan, plan)
    check_weights(recipe, resolved)
    ensure_shards(recipe, resolved)
    run = _claim_folder(name, checked.recipe.name)
    _write(run, Checked(resolved, checked.plan, checked.cluster))
    return run


def choose_folder(name: str | None, recipe_name: str) -> RunFolder:
    """A folder that does not exist yet: the name asked for, or the recipe's with a number behind it."""
    if name is None:
        names = (recipe_name if number == 1 else f"{recipe_name}-{number}" for number in count(1))
        return RunFolder(next(path for each in names if not (path := RUNS.absolute() / each).exists()))
    path = RUNS.absolute() / name
    if Path(name).name != name:
        message = f'"{name}" must be a plain name, without folders'
        raise SpecError([problem_at(path, 1, "name", message, f"--name {Path(name).name or 'run'}")])
    if path.exists():
        message = f"is the name of a run that exists: {path}"
        raise SpecError([problem_at(path, 1, "name", message, f"another name, or --resume {name}")])
    return RunFolder(path)


def _claim_folder(name: str | None, recipe_name: str) -> RunFolder:
    """Make the folder; where another start was quicker, the next one."""
    while True:
        run = choose_folder(name, recipe_name)
        try:
            run.path.mkdir(parents=True)
        except FileExistsError:
            continue
        return run


def ensure_shards(path: Path, recipe: Recipe) -> None:
    """Build the recipe's token shards if they do not exist yet, and check that the model can read them."""
    data, document = recipe.data, toml.read(path)
    tokenizer = open_tokenizer(data.tokenizer)
    if tokenizer.vocabulary > recipe.model.vocabulary:
        line = document.line(("model", "vocabulary"))
        message = f"is {recipe.model.vocabulary}, but the tokenizer has token ids up to {tokenizer.vocabulary - 1}"
        raise SpecError([problem_at(path, line, "model.vocabulary", message, f"at least {tokenizer.vocabulary}")])
    for number, part in enumerate(data.parts):
        place = ("data", "sources", number, "shards") if data.sources else ("data", "shards")
        _ensure_part(Sourced(recipe, document), place, part, tokenizer)
    TrainingData.of(data, recipe.batch.length, recipe.seed, on_warning=_warn)  # says so if it has not one sample


def _ensure_part(recipe: Sourced[Recipe], place: toml.KeyPath, part: DataSource, tokenizer: Tokenizer) -> None:
    """Build one data set of the recipe if it does not exist yet, and check that it has the recipe's tokenizer."""
    if not is_remote(part.shards) and not (Path(part.shards) / INDEX).exists():
        if not part.source:
            message = f'"{part.shards}" is not a data set'
            hint = f"danlu data build SOURCE… -o {part.shards}, or name a `source` beside it"
            raise SpecError([recipe.problem(dotted(place), message, hint)])
        typer.echo(f"building token shards in {part.shards} from {', '.join(part.source)}")
        build_with_progress(list(part.source), Path(part.shards), tokenizer)
    index = open_shards(part.shards, recipe.value.data, check_sizes=False, on_warning=_warn).index
    if index.tokenizer != tokenizer.name:
        message = f'was built with tokenizer "{index.tokenizer}", but the recipe says "{tokenizer.name}"'
        hint = "another folder, or build it again with `danlu data build … --force`"
        raise SpecError([recipe.problem(dotted(place), message, hint)])


def _warn(message: str) -> None:
    typer.echo(f"warning: {message}", err=True)


def check_weights(path: Path, recipe: Recipe) -> None:
    """Hold the weights that a run starts from, if there are any, against its model."""
    if not recipe.weights:
        return
    from danlu.framework.weights import open_weights

    folder, document, model = Path(recipe.weights), toml.read(path), recipe.model
    if isinstance(model, Model):
        _check_imported(path, document, model, folder)
    open_weights(folder, model)


def _check_imported(path: Path, document: toml.Document, model: Model, folder: Path) -> None:
    from danlu.framework.hf import MODEL, differing_fields

    imported = load_model(str(folder / MODEL))
    problems = [
        problem_at(
            path,
            document.line(("model", field)),
            f"model.{field}",
            f"is {shown(getattr(model, field))}, but {shown(getattr(imported, field))} in {folder / MODEL}",
            "what the weights were made with",
        )
        for field in differing_fields(model, imported)
    ]
    if problems:
        raise SpecError(problems)


def _write(run: RunFolder, checked: Checked) -> None:
    run.recipe.write_text(toml.dumps(checked.recipe))
    run.plan.write_text(toml.dumps(checked.plan))
    if checked.cluster is not None:
        run.cluster.write_text(toml.dumps(checked.cluster))
