"""The store of a run's checkpoints: a folder of the run, or the store that its recipe names. No torch."""

from collections.abc import Mapping
from pathlib import Path

from danlu.spec import RunFolder, load_recipe
from danlu.spec.recipe import CheckpointConfig
from danlu.storage.store.base import Store, open_store


def run_store_location(run: RunFolder, saves: CheckpointConfig) -> tuple[str, Mapping[str, str]]:
    """Address and options of the store; one named in a recipe is shared by runs, each under its name."""
    if not saves.store:
        return str(run.checkpoints), {}
    where = saves.store if "://" in saves.store else str(Path(saves.store).resolve())
    return f"{where.rstrip('/')}/{run.name}", saves.options


def open_run_store(run: RunFolder) -> Store:
    """Open the store of a run's checkpoints, as the recipe in its folder names it."""
    where, options = run_store_location(run, load_recipe(run.recipe).checkpoint)
    return open_store(where, options)
