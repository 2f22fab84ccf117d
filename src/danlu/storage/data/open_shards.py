"""Open the data set that a recipe names, in a folder or in a store."""

from pathlib import Path

from danlu.spec import SpecError
from danlu.spec.recipe import DataConfig
from danlu.spec.rules.data import is_remote
from danlu.storage.data.block_cache import BlockCache
from danlu.storage.data.shard_reader import dataset_problem
from danlu.storage.data.store_shard_reader import StoreShardReader
from danlu.storage.data.token_shards import OnWarning, TokenShards, emit_warning
from danlu.storage.store.base import open_store


def open_shards(
    where: str, data: DataConfig, *, check_sizes: bool = True, on_warning: OnWarning = emit_warning
) -> TokenShards:
    """Open the data set in a folder, or in a store through the recipe's cache; paths must be resolved."""
    if not is_remote(where):
        return TokenShards.open(Path(where), check_sizes=check_sizes, on_warning=on_warning)
    try:
        reader = StoreShardReader(
            open_store(where, data.options), BlockCache(Path(data.cache), data.cache_size), on_warning
        )
    except ValueError as error:  # an invalid option, address or size
        raise SpecError([dataset_problem(where, "", "data.options", str(error))]) from None
    return TokenShards.from_reader(reader, check_sizes=check_sizes, on_warning=on_warning)
