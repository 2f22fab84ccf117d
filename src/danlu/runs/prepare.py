"""From a recipe to a run folder that workers can start from: everything checked, data built, files written."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path

from danlu.framework.custom.check import check_custom_model
from danlu.report.precision_text import slow_precision_note
from danlu.report.run_tables import find_run
from danlu.report.terminal import Console, print_warning
from danlu.runs.dataset import ensure_dataset
from danlu.spec import Model, Plan, Recipe, RunFolder, SpecError, load_plan, load_recipe, toml
from danlu.spec.check import ClusterSource, PlanSource, RecipeSource, RunSpec, load_run_spec, parsed_without_file
from danlu.spec.load import ParsedSpec, load_model, read_plan, read_recipe
from danlu.spec.names import NAME_RULE, is_name, sanitize_name
from danlu.spec.plan import fully_sharded_plan
from danlu.spec.problem import format_value, problem_at
from danlu.spec.run_folder import DEFAULT_RUNS_DIR
from danlu.storage import run_lock
from danlu.storage.access import set_umask
from danlu.storage.checkpoint.checkpoint_dir import CheckpointDir
from danlu.storage.checkpoint.run_store import open_run_store
from danlu.storage.run_lock import RunError, RunLock


def check_run(
    recipe: RecipeSource,
    plan: PlanSource | None,
    cluster: ClusterSource | None,
    world: int,
    settings: Sequence[str] = (),
) -> RunSpec:
    """Check a run of `world` ranks without writing anything; without a plan its states are sharded over all ranks."""
    spec = load_run_spec(recipe, plan, cluster, fully_sharded_plan(world), settings)
    warn_slow_precision(spec)
    check_custom_model(spec)
    return spec


def warn_slow_precision(spec: RunSpec) -> None:
    """Print what the precision costs, if the cluster's chip is far faster in another."""
    if note := slow_precision_note(spec.recipe, spec.plan, spec.cluster):
        print_warning(note)


def prepare_run(
    recipe: RecipeSource,
    plan: PlanSource | None = None,
    cluster: ClusterSource | None = None,
    name: str | None = None,
    world: int = 1,
    settings: Sequence[str] = (),
    *,
    folder: Path = DEFAULT_RUNS_DIR,
    console: Console | None = None,
) -> tuple[RunFolder, RunLock]:
    """Check a run, build its data if necessary, acquire its lock and write its folder.

    Raises `SpecError` before anything is written. Files that this process writes afterwards have the permissions of the
    recipe's `access`. `settings` such as `steps=10` override the recipe.
    """
    spec = check_run(recipe, plan, cluster, world, settings)
    choose_new_run_folder(name, spec.recipe.name, folder)  # an invalid name is refused before anything is built
    parsed = ParsedSpec(spec.recipe, spec.recipe_document)
    check_weights(parsed)
    ensure_dataset(parsed, console or Console())
    try:
        folder.mkdir(exist_ok=True)  # with default permissions; only the run folders are private
        set_umask(spec.recipe.access)
        run = _make_run_folder(name, spec.recipe.name, folder)
        lock = run_lock.acquire(run)
        for path, text in _spec_texts(run, spec).items():
            path.write_text(text)
    except OSError as error:
        raise RunError(f"{folder.absolute()} cannot be written to: {error.strerror}; nothing was started") from None
    return run, lock


def choose_world_size(nproc: int | None, plan: PlanSource | None) -> int:
    """Number of processes, as requested or as the plan needs; both must agree."""
    if plan is None:
        return nproc or 1
    layout = parsed_without_file(plan, "plan") if isinstance(plan, Plan) else read_plan(Path(plan))
    needed = layout.value.degrees.world
    if nproc is not None and nproc != needed:
        message = f"lay out {needed} ranks, but --nproc is {nproc}"
        raise SpecError([layout.problem("degrees", message, f"--nproc {needed}, or omit it")])
    return needed


def prepare_resume(
    name: str, nproc: int | None, plan: Path | None, cluster: str | None, folder: Path = DEFAULT_RUNS_DIR
) -> tuple[RunFolder, RunLock]:
    """The folder of a run to resume and its lock, acquired before its plan and cluster are replaced."""
    run = find_run(name, folder)
    lock = run_lock.acquire(run)
    try:
        _replace_layout(run, nproc, plan, cluster)
    except BaseException:
        lock.release()
        raise
    return run, lock


def _replace_layout(run: RunFolder, nproc: int | None, plan: Path | None, cluster: str | None) -> None:
    if plan is None and nproc in (None, load_plan(run.plan).degrees.world):
        plan = run.plan
    if cluster is None and run.cluster.exists():
        cluster = str(run.cluster)
    _check_not_finished(run)
    default = fully_sharded_plan(choose_world_size(nproc, plan))
    spec = load_run_spec(run.recipe, plan, cluster, default)
    warn_slow_precision(spec)
    set_umask(spec.recipe.access)
    texts = _spec_texts(run, spec)
    del texts[run.recipe]
    try:
        for path, text in texts.items():
            fresh = path.with_name(f".{path.name}.new")  # atomic: a full disk leaves the old one
            fresh.write_text(text)
            fresh.replace(path)
    except OSError as error:
        raise RunError(f"{run.path} cannot be written to: {error.strerror}; nothing was started") from None


def _check_not_finished(run: RunFolder) -> None:
    """A run whose steps are all done cannot be resumed; one that was cut off before the last of them was saved can."""
    recipe = read_recipe(run.recipe)
    events = [event for event in run.read_events() if event.kind in ("step", "ended")]
    if max((event.step for event in events), default=0) < recipe.value.steps:
        return
    finished = events[-1].kind == "ended" and events[-1].outcome == "finished"
    if not finished:
        try:
            saved = CheckpointDir(open_run_store(run), keep=1).resumable_steps()
        except (OSError, ImportError) as error:
            raise RunError(f"{run.name}: whether its last step was saved cannot be seen: {error}") from None
        finished = bool(saved) and saved[-1] >= recipe.value.steps
    if finished:
        message = f"is {recipe.value.steps}, and all of them are done"
        raise SpecError([recipe.problem("steps", message, "raise it to train on")])


def _spec_texts(run: RunFolder, spec: RunSpec) -> dict[Path, str]:
    """The files of a run folder that describe the run."""
    texts = {run.recipe: toml.dumps(spec.recipe), run.plan: toml.dumps(spec.plan)}
    return texts if spec.cluster is None else {**texts, run.cluster: toml.dumps(spec.cluster)}


def choose_new_run_folder(name: str | None, recipe_name: str, folder: Path = DEFAULT_RUNS_DIR) -> RunFolder:
    """A folder that does not exist yet: the requested name, or the recipe's with a number appended."""
    if name is None:
        names = (recipe_name if number == 1 else f"{recipe_name}-{number}" for number in count(1))
        return RunFolder(next(path for each in names if not (path := folder.absolute() / each).exists()))
    if not is_name(name):
        message = f"is {format_value(name)}, but must be {NAME_RULE}"
        raise SpecError([problem_at(folder, 1, "--name", message, f"--name {sanitize_name(name)}")])
    path = folder.absolute() / name
    if path.exists():
        message = f"is the name of a run that exists: {path}"
        raise SpecError([problem_at(path, 1, "name", message, f"another name, or --resume {name}")])
    return RunFolder(path)


def _make_run_folder(name: str | None, recipe_name: str, folder: Path) -> RunFolder:
    """Create the folder; the next one if another process was faster."""
    while True:
        run = choose_new_run_folder(name, recipe_name, folder)
        try:
            run.path.mkdir()
        except FileExistsError:
            continue
        return run


def check_weights(recipe: ParsedSpec[Recipe]) -> None:
    """Check the initial weights of a run, if there are any, against its model."""
    if not recipe.value.weights:
        return
    from danlu.framework.hf.convert import MODEL_FILE
    from danlu.framework.weights import check_checkpoint_weights, newest_checkpoint, open_weights

    folder, model = Path(recipe.value.weights), recipe.value.model
    checkpoint = newest_checkpoint(folder)
    if isinstance(model, Model):
        trained = RunFolder(folder).recipe
        if checkpoint is None or (folder / MODEL_FILE).is_file():
            _check_against_model(recipe, model, load_model(str(folder / MODEL_FILE)), folder / MODEL_FILE)
        elif trained.is_file() and isinstance(other := load_recipe(trained).model, Model):
            _check_against_model(recipe, model, other, trained)
    if checkpoint is not None:
        check_checkpoint_weights(checkpoint, model)
    else:
        open_weights(folder, model)


def _check_against_model(recipe: ParsedSpec[Recipe], model: Model, trained: Model, file: Path) -> None:
    """Raise `SpecError` if the weights are of a model that computes something else, though shapes may agree."""
    from danlu.framework.hf.convert import differing_fields

    problems = [
        recipe.problem(
            f"model.{field}",
            f"is {format_value(getattr(model, field))}, but {format_value(getattr(trained, field))} in {file}",
            "use the value that the weights were trained with",
        )
        for field in differing_fields(model, trained)
    ]
    if problems:
        raise SpecError(problems)
