"""The files of a data set in a store such as S3: range reads of blocks, through a cache on a local disk.

Errors and wrong bytes are retried with exponential backoff and a warning. Fails after the retry timeout. What is
returned has the checksum it was built with.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import groupby
from typing import NamedTuple, TypeVar

import numpy as np

from danlu.spec import Problem, SpecError
from danlu.storage.data.block_cache import BlockCache
from danlu.storage.data.block_checksums import ByteArray, Checksums, block_crc32c, block_range, parse_checksums
from danlu.storage.data.dataset_index import (
    CHECKSUM_BLOCK_BYTES,
    INDEX_FILE,
    REBUILD_HINT,
    DatasetIndex,
    ShardInfo,
    disk_dtype,
    parse_index,
)
from danlu.storage.data.shard_reader import (
    READ_CHUNK_BYTES,
    CorruptBlockError,
    ShardSlice,
    check_sha256,
    dataset_problem,
)
from danlu.storage.store.base import PERMANENT_ERRORS, Store

RETRY_TIMEOUT = 600.0
"""Seconds for which a store may fail before the run fails."""

_MAX_CONCURRENT_READS = 16  # one takes tens of milliseconds, nearly all of it waiting
_MAX_CACHED_TABLES = 1024  # of checksums, held in memory: 16 KiB each for a shard of 256 MiB
_INITIAL_BACKOFF, _MAX_BACKOFF = 0.1, 30.0
_SLOW_SECONDS = 5.0
_WARNING_INTERVAL = 30.0  # seconds between two warnings
_MAX_CORRUPT_READS = 3  # reads of a block with a wrong checksum before it counts as corrupt

T = TypeVar("T")


class _BlockRun(NamedTuple):
    """Adjacent blocks of a shard, read at once."""

    shard: int
    first: int
    blocks: int


class StoreShardReader:
    """A data set behind a `Store`."""

    def __init__(
        self,
        store: Store,
        cache: BlockCache,
        on_warning: Callable[[str], None],
        *,
        timeout: float = RETRY_TIMEOUT,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`pause` waits so many seconds between two attempts."""
        self.location = store.name
        self._store, self._cache, self._on_warning = store, cache, on_warning
        self._timeout, self._pause = timeout, pause
        self._pool = ThreadPoolExecutor(_MAX_CONCURRENT_READS, thread_name_prefix="shard read")
        self._thread_blocks = threading.local()
        self._checksums = lru_cache(maxsize=_MAX_CACHED_TABLES)(self._read_checksums)
        self._next_warning = 0.0
        self._cache_works, self._cache_lock = True, threading.Lock()
        self._index: DatasetIndex | None = None

    def read_index(self) -> DatasetIndex:
        """Read the current index."""
        try:
            raw = self._retry_all([partial(self._store.read, INDEX_FILE)])[0]
        except FileNotFoundError:
            hint = f"build a data set in a folder and copy it to {self.location}"
            raise SpecError([dataset_problem(self.location, INDEX_FILE, "data", "does not exist", hint)]) from None
        index = parse_index(raw, f"{self.location}/{INDEX_FILE}")
        if not all(shard.sums for shard in index.shards):
            message = "has shards without block checksums, which remote data needs"
            raise SpecError([dataset_problem(self.location, INDEX_FILE, "sums", message, REBUILD_HINT)])
        self._index = index
        return index

    def sync(self) -> None:
        """Nothing to do: a file in a store is visible only when it is durable."""

    def check_size(self, shard: ShardInfo, expected: int) -> Problem | None:
        """Not checked: it would take one request per shard, and a short shard fails when it is read."""
        return None

    def read_sidecar(self, file: str, sha256: str) -> bytes:
        """A small file of the data set, verified against its hash."""
        raw = self._call_all([partial(self._store.read, file)])[0]
        check_sha256(self.location, file, raw, sha256)
        return raw

    def iter_chunks(self, shard: ShardInfo) -> Iterator[bytes]:
        """All bytes of a shard in order, not verified."""
        assert self._index is not None
        size = shard.tokens * disk_dtype(self._index.dtype).itemsize
        for offset in range(0, size, READ_CHUNK_BYTES):
            length = min(READ_CHUNK_BYTES, size - offset)
            yield self._call_all([partial(self._store.read, shard.file, offset, length)])[0]

    def prefetch(self, spans: Sequence[ShardSlice]) -> None:
        """Fetch the blocks of these slices that are not cached, several at once; this thread reads them next."""
        wanted = sorted({(span.shard, block) for span in spans for block in block_range(span.offset, span.length)})
        held = {key: raw for key in wanted if (raw := self._cached(*key)) is not None}
        runs = list(_block_runs([key for key in wanted if key not in held]))
        for run, blocks in zip(runs, self._fetch(runs), strict=True):
            held |= {(run.shard, run.first + number): raw for number, raw in enumerate(blocks)}
        self._thread_blocks.blocks = held

    def read(self, span: ShardSlice) -> ByteArray:
        """Bytes of a shard; every block is verified."""
        held: dict[tuple[int, int], bytes] = getattr(self._thread_blocks, "blocks", {})
        blocks = block_range(span.offset, span.length)
        if any((span.shard, block) not in held for block in blocks):
            self.prefetch([span])
            held = self._thread_blocks.blocks
        raw = b"".join(held[span.shard, block] for block in blocks)
        start = span.offset - blocks.start * CHECKSUM_BLOCK_BYTES
        return np.frombuffer(raw, dtype=np.uint8)[start : start + span.length]

    def _cached(self, number: int, block: int) -> bytes | None:
        shard, sums = self._shard(number), self._checksums(number)
        return self._cache.get(shard.sha256, block, self._blocks_length(shard, block, 1), int(sums[block]))

    def _fetch(self, runs: list[_BlockRun]) -> list[list[bytes]]:
        """The blocks of each run, from the store and into the cache."""
        wrong: dict[tuple[int, int], int] = {}

        def fetch(run: _BlockRun) -> list[bytes]:
            shard, sums = self._shard(run.shard), self._checksums(run.shard)
            offset, length = run.first * CHECKSUM_BLOCK_BYTES, self._blocks_length(shard, run.first, run.blocks)
            raw = self._store.read(shard.file, offset, length)
            blocks = [raw[start : start + CHECKSUM_BLOCK_BYTES] for start in range(0, length, CHECKSUM_BLOCK_BYTES)]
            for block, piece in enumerate(blocks, start=run.first):
                if (found := block_crc32c(piece)) != sums[block]:
                    times = wrong[run.shard, block] = wrong.get((run.shard, block), 0) + 1
                    if times >= _MAX_CORRUPT_READS:
                        raise CorruptBlockError(run.shard, block, found, int(sums[block]))
                    raise OSError(
                        f"block {block} of {shard.file} was read with CRC-32C {found:08x}, not {sums[block]:08x}"
                    )
                self._cache_block(shard.sha256, block, piece)
            return blocks

        for run in runs:
            self._checksums(run.shard)  # here, not in the pool, where it would wait for a thread of the pool itself
        return self._call_all([partial(fetch, run) for run in runs])

    def _cache_block(self, content: str, block: int, raw: bytes) -> None:
        if not self._cache_works:
            return
        try:
            self._cache.put(content, block, raw)
        except OSError as error:
            with self._cache_lock:  # several threads of the pool fail at once
                first_failure, self._cache_works = self._cache_works, False
            if first_failure:
                self._on_warning(f"the cache for {self.location} cannot be written and is no longer used: {error}")

    def _call_all(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """The results of all calls; missing files and missing permissions are reported as problems."""
        try:
            return self._retry_all(calls)
        except PERMANENT_ERRORS as error:
            raise SpecError([dataset_problem(self.location, "", "store", str(error), REBUILD_HINT)]) from None

    def _retry_all(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """The results of all calls, made concurrently; those that fail are retried until the retry timeout.

        The pauses are in this thread and not in the pool, whose threads would delay the exit of the process.
        """
        results: dict[int, T] = {}
        began, pause = time.monotonic(), _INITIAL_BACKOFF
        left = list(range(len(calls)))
        waited = 0.0
        while left:
            futures = {number: self._pool.submit(calls[number]) for number in left}
            failures: list[OSError] = []
            for number, future in futures.items():
                try:
                    results[number] = future.result()
                except PERMANENT_ERRORS:
                    raise
                except OSError as error:
                    failures.append(error)
            left = [number for number in left if number not in results]
            seconds = max(waited, time.monotonic() - began)
            if left:
                if seconds > self._timeout:
                    message = f"did not answer for {seconds:.0f} s: {failures[0]}"
                    hint = "check that the store is up and reachable, and resume the run"
                    raise SpecError([dataset_problem(self.location, "", "store", message, hint)])
                self._warn(f"{self.location} fails, retrying for {self._timeout - seconds:.0f} s more: {failures[0]}")
                self._pause(pause * random.uniform(0.5, 1.0))  # ranks that failed together must not retry together
                waited, pause = waited + pause, min(2 * pause, _MAX_BACKOFF)
            elif seconds > _SLOW_SECONDS:
                self._warn(f"{self.location} is slow: {len(calls)} reads took {seconds:.1f} s")
        return [results[number] for number in range(len(calls))]

    def _warn(self, message: str) -> None:
        if time.monotonic() >= self._next_warning:
            self._next_warning = time.monotonic() + _WARNING_INTERVAL
            self._on_warning(message)

    def _shard(self, number: int) -> ShardInfo:
        assert self._index is not None  # a slice comes from an index
        return self._index.shards[number]

    def _blocks_length(self, shard: ShardInfo, first: int, count: int) -> int:
        assert self._index is not None
        size = shard.tokens * disk_dtype(self._index.dtype).itemsize
        return min((first + count) * CHECKSUM_BLOCK_BYTES, size) - first * CHECKSUM_BLOCK_BYTES

    def _read_checksums(self, number: int) -> Checksums:
        shard = self._shard(number)
        return parse_checksums(self.read_sidecar(shard.sidecar_name(".crc"), shard.sums))


def _block_runs(keys: list[tuple[int, int]]) -> Iterator[_BlockRun]:
    """Groups of adjacent blocks, given in order."""
    for _, group in groupby(enumerate(keys), lambda item: (item[1][0], item[1][1] - item[0])):
        blocks = [key for _, key in group]
        yield _BlockRun(blocks[0][0], blocks[0][1], len(blocks))
