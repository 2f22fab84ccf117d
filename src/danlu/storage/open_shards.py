"""The data set that a recipe names, wherever it lies."""

from pathlib import Path

from danlu.spec.recipe import Data
from danlu.storage.tokens import OnWarning, TokenShards, python_warning


def open_shards(
    where: str, data: Data, *, check_sizes: bool = True, on_warning: OnWarning = python_warning
) -> TokenShards:
    """Open the data set in a folder, with paths resolved."""
    return TokenShards.open(Path(where), check_sizes=check_sizes, on_warning=on_warning)
