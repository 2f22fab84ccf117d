"""The files of a data set in a store such as S3: blocks by range reads, through a cache on a local disk.

A store that fails is tried again with longer and longer pauses, and the user is told; one that gives wrong bytes is
tried again too. What cannot be had within the patience is an error. What is returned has the sum it was built with.
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
from danlu.storage.block_cache import BlockCache
from danlu.storage.blocks import Raw, Sums, blocks_of, read_table, sum_of
from danlu.storage.index import BLOCK, INDEX, REBUILD, Index, Shard, on_disk, parse_index
from danlu.storage.shard_files import CHUNK, DamagedBlockError, Span, check_hash, problem_in
from danlu.storage.store import Store

PATIENCE = 600.0
"""Seconds for which a store may fail before a run does."""

_AT_ONCE = 16  # range reads under way; one takes tens of milliseconds, nearly all of it waiting
_TABLES = 1024  # of sums, held in memory: 16 KiB each for a shard of 256 MiB
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 30.0
_SLOW = 5.0
_QUIET = 30.0  # seconds between two warnings
_WRONG_BYTES = 3  # times a block may come with a wrong sum before it is called damaged
_FINAL = (FileNotFoundError, EOFError, PermissionError)  # asking again does not mend these

T = TypeVar("T")


class _Run(NamedTuple):
    """Neighbouring blocks of a shard, read at once."""

    shard: int
    first: int
    blocks: int


class StoreFiles:
    """A data set behind a `Store`."""

    def __init__(
        self,
        store: Store,
        cache: BlockCache,
        on_warning: Callable[[str], None],
        *,
        patience: float = PATIENCE,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`pause` waits so many seconds between two tries."""
        self.where = store.name
        self._store, self._cache, self._on_warning = store, cache, on_warning
        self._patience, self._pause = patience, pause
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="shard read")
        self._hand = threading.local()
        self._table = lru_cache(maxsize=_TABLES)(self._read_table)
        self._next_warning = 0.0
        self._cache_works = True
        self._index: Index | None = None

    def index(self) -> Index:
        """The index as it is now."""
        try:
            raw = self._persist([partial(self._store.read, INDEX)])[0]
        except FileNotFoundError:
            hint = f"build a data set in a folder and copy it to {self.where}"
            raise SpecError([problem_in(self.where, INDEX, "data", "is not there", hint)]) from None
        index = parse_index(raw, f"{self.where}/{INDEX}")
        if not all(shard.sums for shard in index.shards):
            message = "has shards without checksums of blocks, which data from afar must have"
            raise SpecError([problem_in(self.where, INDEX, "sums", message, REBUILD)])
        self._index = index
        return index

    def wrong_size(self, shard: Shard, expected: int) -> Problem | None:
        """Nothing: asking for every size takes as many requests as shards, and what is short fails when it is read."""
        return None

    def whole(self, file: str, sha256: str) -> bytes:
        """A small file that belongs to the data set, held against its hash."""
        raw = self._lasting([partial(self._store.read, file)])[0]
        check_hash(self.where, file, raw, sha256)
        return raw

    def chunks(self, shard: Shard) -> Iterator[bytes]:
        """All bytes of a shard in order, unchecked."""
        assert self._index is not None
        size = shard.tokens * on_disk(self._index.dtype).itemsize
        for offset in range(0, size, CHUNK):
            length = min(CHUNK, size - offset)
            yield self._lasting([partial(self._store.read, shard.file, offset, length)])[0]

    def prepare(self, spans: Sequence[Span]) -> None:
        """Fetch the blocks of these spans that are not in the cache, several at once; this thread reads them next."""
        wanted = sorted({(span.shard, block) for span in spans for block in blocks_of(span.offset, span.length)})
        held = {place: raw for place in wanted if (raw := self._cached(*place)) is not None}
        runs = list(_runs([place for place in wanted if place not in held]))
        for run, blocks in zip(runs, self._fetch(runs), strict=True):
            held |= {(run.shard, run.first + number): raw for number, raw in enumerate(blocks)}
        self._hand.blocks = held

    def read(self, span: Span) -> Raw:
        """Bytes of a shard, every block of them checked."""
        held: dict[tuple[int, int], bytes] = getattr(self._hand, "blocks", {})
        blocks = blocks_of(span.offset, span.length)
        if any((span.shard, block) not in held for block in blocks):
            self.prepare([span])
            held = self._hand.blocks
        raw = b"".join(held[span.shard, block] for block in blocks)
        start = span.offset - blocks.start * BLOCK
        return np.frombuffer(raw, dtype=np.uint8)[start : start + span.length]

    def _cached(self, number: int, block: int) -> bytes | None:
        shard, sums = self._shard(number), self._table(number)
        return self._cache.get(shard.sha256, block, self._length(shard, block, 1), int(sums[block]))

    def _fetch(self, runs: list[_Run]) -> list[list[bytes]]:
        """The blocks of each run, out of the store and into the cache."""
        wrong: dict[tuple[int, int], int] = {}

        def fetch(run: _Run) -> list[bytes]:
            shard, sums = self._shard(run.shard), self._table(run.shard)
            offset, length = run.first * BLOCK, self._length(shard, run.first, run.blocks)
            raw = self._store.read(shard.file, offset, length)
            blocks = [raw[start : start + BLOCK] for start in range(0, length, BLOCK)]
            for block, piece in enumerate(blocks, start=run.first):
                if (found := sum_of(piece)) != sums[block]:
                    times = wrong[run.shard, block] = wrong.get((run.shard, block), 0) + 1
                    if times >= _WRONG_BYTES:
                        raise DamagedBlockError(run.shard, block, found, int(sums[block]))
                    raise OSError(f"block {block} of {shard.file} came with CRC-32C {found:08x}, not {sums[block]:08x}")
                self._keep(shard.sha256, block, piece)
            return blocks

        for run in runs:
            self._table(run.shard)  # here, and not in the pool, where it would wait for a place in the pool itself
        return self._lasting([partial(fetch, run) for run in runs])

    def _keep(self, content: str, block: int, raw: bytes) -> None:
        if not self._cache_works:
            return
        try:
            self._cache.put(content, block, raw)
        except OSError as error:
            self._cache_works = False
            self._on_warning(f"the cache for {self.where} cannot be written and is left alone: {error}")

    def _lasting(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """The answers of all calls; what is not there, or not ours to read, is said in our words."""
        try:
            return self._persist(calls)
        except _FINAL as error:
            raise SpecError([problem_in(self.where, "", "store", str(error), REBUILD)]) from None

    def _persist(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """The answers of all calls, made side by side; those that fail are made again until the patience is over.

        The pauses are in this thread and not in the pool, whose threads hold up the end of the process.
        """
        answers: dict[int, T] = {}
        began, pause = time.monotonic(), _FIRST_PAUSE
        left = list(range(len(calls)))
        waited = 0.0
        while left:
            futures = {number: self._pool.submit(calls[number]) for number in left}
            failures: list[OSError] = []
            for number, future in futures.items():
                try:
                    answers[number] = future.result()
                except _FINAL:
                    raise
                except OSError as error:
                    failures.append(error)
            left = [number for number in left if number not in answers]
            seconds = max(waited, time.monotonic() - began)
            if left:
                if seconds > self._patience:
                    message = f"did not answer for {seconds:.0f} s: {failures[0]}"
                    hint = "see that the store is up and the network reaches it, and resume the run"
                    raise SpecError([problem_in(self.where, "", "store", message, hint)])
                self._warn(f"{self.where} fails, trying again for {self._patience - seconds:.0f} s more: {failures[0]}")
                self._pause(pause * random.uniform(0.5, 1.0))  # ranks that failed together do not come back together
                waited, pause = waited + pause, min(2 * pause, _LONGEST_PAUSE)
            elif seconds > _SLOW:
                self._warn(f"{self.where} is slow: {len(calls)} reads took {seconds:.1f} s")
        return [answers[number] for number in range(len(calls))]

    def _warn(self, message: str) -> None:
        if time.monotonic() >= self._next_warning:
            self._next_warning = time.monotonic() + _QUIET
            self._on_warning(message)

    def _shard(self, number: int) -> Shard:
        assert self._index is not None  # a span comes out of an index
        return self._index.shards[number]

    def _length(self, shard: Shard, first: int, count: int) -> int:
        assert self._index is not None
        size = shard.tokens * on_disk(self._index.dtype).itemsize
        return min((first + count) * BLOCK, size) - first * BLOCK

    def _read_table(self, number: int) -> Sums:
        shard = self._shard(number)
        return read_table(self.whole(shard.beside(".crc"), shard.sums))


def _runs(places: list[tuple[int, int]]) -> Iterator[_Run]:
    """Neighbouring blocks of sorted places, together."""
    for _, group in groupby(enumerate(places), lambda item: (item[1][0], item[1][1] - item[0])):
        blocks = [place for _, place in group]
        yield _Run(blocks[0][0], blocks[0][1], len(blocks))
