"""The data set that a recipe names, wherever it lies."""

from pathlib import Path

from danlu.spec import SpecError
from danlu.spec.recipe import Data
from danlu.spec.rules.data import is_remote
from danlu.storage.block_cache import BlockCache
from danlu.storage.shard_files import problem_in
from danlu.storage.store import open_store
from danlu.storage.store_files import StoreFiles
from danlu.storage.tokens import OnWarning, TokenShards, python_warning


def open_shards(
    where: str, data: Data, *, check_sizes: bool = True, on_warning: OnWarning = python_warning
) -> TokenShards:
    """Open the data set in a folder, or in a store behind the cache that the recipe names; with paths resolved."""
    if not is_remote(where):
        return TokenShards.open(Path(where), check_sizes=check_sizes, on_warning=on_warning)
    try:
        files = StoreFiles(open_store(where, data.options), BlockCache(Path(data.cache), data.cache_size), on_warning)
    except ValueError as error:  # an option, an address or a size that cannot be
        raise SpecError([problem_in(where, "", "data.options", str(error))]) from None
    return TokenShards.over(files, check_sizes=check_sizes, on_warning=on_warning)
