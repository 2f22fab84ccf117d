"""Where a run's checkpoints are: in a folder of the run, or in the store that its recipe names. No torch."""

from collections.abc import Mapping
from pathlib import Path

from danlu.spec import RunFolder, load_recipe
from danlu.spec.recipe import Checkpoint
from danlu.storage.store import Store, open_store


def home_of(run: RunFolder, saves: Checkpoint) -> tuple[str, Mapping[str, str]]:
    """A store's address and its options; a store that is named is shared by runs, each under its name."""
    if not saves.store:
        return str(run.checkpoints), {}
    where = saves.store if "://" in saves.store else str(Path(saves.store).resolve())
    return f"{where.rstrip('/')}/{run.name}", saves.options


def open_home(run: RunFolder) -> Store:
    """The store of a run's checkpoints, told by the recipe in its folder."""
    where, options = home_of(run, load_recipe(run.recipe).checkpoint)
    return open_store(where, options)
