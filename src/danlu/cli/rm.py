"""`danlu rm`: remove a run and its memory on this host."""

import shutil
from typing import Annotated

import typer

from danlu.cli.run_options import RunArgument, RunsDirOption
from danlu.comm.flight_record import remove_flights
from danlu.report import formatting
from danlu.report.run_history import read_run_history
from danlu.report.run_tables import find_run
from danlu.spec import RunFolder, SpecError, load_recipe
from danlu.spec.run_folder import DEFAULT_RUNS_DIR
from danlu.storage import run_lock
from danlu.storage.checkpoint.host_memory import free_run_memory
from danlu.storage.run_lock import RunError

_RUN_FILES = {
    *("recipe.toml", "plan.toml", "cluster.toml", "events.jsonl", "data.jsonl", "report.html", "report.html.part"),
    *("events", "tensorboard", "checkpoints", "logs", "ranks.json", "job.json", "job.sbatch", ".lock"),
    *("samples", "wandb", "wandb-id", ".recipe.toml.new", ".plan.toml.new", ".cluster.toml.new"),
    *("compiled-blocks", ".coordinator.json", ".coordinator.json.partial"),
}
_NUMBERED_FILES = (".ranks.json.", ".store-token.")
"""Files that Danlu itself writes into a run folder, and how those begin whose names end in a job's number."""


def rm(
    run: RunArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    folder: RunsDirOption = DEFAULT_RUNS_DIR,
) -> None:
    """Remove a run: its folder with its checkpoints, and the host memory that holds its saves.

    A running run is refused. Checkpoints in a `store` of the recipe are kept and listed.
    """
    found = find_run(run, folder)
    _check_only_run_files(found)
    with run_lock.acquire(found):
        if not yes and not typer.confirm(f"remove {_describe(found)}?"):
            raise typer.Exit(1)
        elsewhere = _remaining_copies(found)
        freed = free_run_memory(found)
        remove_flights(found.path)
        try:
            _remove_run_folder(found)
        except OSError as error:
            raise RunError(f"{error.filename} could not be removed: {error.strerror}") from None
    memory = f" and {formatting.size(freed)} of shared memory" if freed else ""
    typer.echo(f"{found.name} is removed{memory}{elsewhere}")


def _check_only_run_files(run: RunFolder) -> None:
    """Protect a folder of recipes, or one with the user's notes, from removal by mistake."""
    if run.path.is_symlink():
        raise RunError(f"{run.path} is a link; remove its target: danlu rm {run.path.resolve()}")
    names = {path.name for path in run.path.iterdir()}
    if not {"recipe.toml", "plan.toml"} <= names:
        raise RunError(f"{run.path} is not the folder of a run: it does not have both recipe.toml and plan.toml")
    if unknown := sorted(name for name in names - _RUN_FILES if not name.startswith(_NUMBERED_FILES)):
        raise RunError(f"{run.path} has files Danlu did not write ({', '.join(unknown)}): move them away first")


def _describe(run: RunFolder) -> str:
    history = read_run_history(run)
    size = sum(path.lstat().st_size for path in run.path.rglob("*") if path.is_file())
    saves = f", {len(list(run.checkpoints.glob('step-*')))} checkpoints" if run.checkpoints.is_dir() else ""
    return f"{run.path} ({history.state} at step {history.step:,}{saves}, {formatting.size(size)})"


def _remaining_copies(run: RunFolder) -> str:
    """Locations of copies that others may share, which are kept."""
    try:
        saves = load_recipe(run.recipe).checkpoint
    except SpecError:
        return ""
    locations = [location for location in (saves.store, saves.near) if location]
    return f"; its checkpoints in {' and '.join(locations)} are kept" if locations else ""


def _remove_run_folder(run: RunFolder) -> None:
    """Recipe and plan are removed last, so that an interrupted removal can be repeated."""
    last = (run.recipe, run.plan)
    for path in sorted(run.path.iterdir()):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path not in last:
            path.unlink()
    for path in last:
        path.unlink()
    run.path.rmdir()
