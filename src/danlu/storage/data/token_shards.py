"""Token shards, and the samples that a run reads from them."""

import hashlib
import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from danlu.spec import Problem, SpecError
from danlu.storage.data.dataset_index import (
    CHECKSUM_BLOCK_BYTES,
    INDEX_FILE,
    REBUILD_HINT,
    DatasetIndex,
    disk_dtype,
    token_counts_file,
)
from danlu.storage.data.growing_shuffle import GrowingShuffle
from danlu.storage.data.shard_reader import (
    READ_CHUNK_BYTES,
    CorruptBlockError,
    IndexChangedError,
    LocalShardReader,
    ShardReader,
    ShardSlice,
    dataset_problem,
)
from danlu.storage.data.shuffle import IntArray
from danlu.storage.data.token_marks import MARK_BITS, pack_marks

OnProgress = Callable[[int, int], None]
"""Called with the bytes done and the total bytes."""
OnWarning = Callable[[str], None]

_MAX_CACHED_ENDS = 64  # tables of document ends held in memory: 8 bytes per document


def ignore_progress(done: int, total: int) -> None:
    """Report nothing."""


def emit_warning(message: str) -> None:
    """Issue a Python warning; a run writes an event instead."""
    warnings.warn(message, stacklevel=3)


class DocumentSpan(NamedTuple):
    """The part of one document in a range of tokens."""

    document: int | None
    """Its number in the data set, or None if the data set does not record it."""
    start: int
    """First token of the part, counted over all shards."""
    tokens: int


class TokenShards:
    """A data set with random access to its tokens; a read returns what was built, or raises."""

    def __init__(self, reader: ShardReader, index: DatasetIndex) -> None:
        """Use an index as given; `open` opens a folder."""
        self.reader = reader
        self._set_index(index)
        self._ends_of = lru_cache(maxsize=_MAX_CACHED_ENDS)(self._read_ends)

    @classmethod
    def open(cls, folder: Path, *, check_sizes: bool = True, on_warning: OnWarning = emit_warning) -> Self:
        """Open a data set and check the size of every shard. Content is verified when read, all of it by `verify`.

        It is enough that one rank checks all sizes; the others pass False, to spare the file system a stat of every
        file from every rank. A shard is checked again when it is first read.
        """
        return cls.from_reader(LocalShardReader(folder), check_sizes=check_sizes, on_warning=on_warning)

    @classmethod
    def from_reader(
        cls, reader: ShardReader, *, check_sizes: bool = True, on_warning: OnWarning = emit_warning
    ) -> Self:
        """Open the data set of a reader."""
        shards = cls(reader, reader.read_index())
        if check_sizes and (problems := shards._size_problems()):
            raise SpecError(problems)
        if check_sizes and (without_checksums := sum(not shard.sums for shard in shards.index.shards)):
            on_warning(
                f"{reader.location}: {without_checksums} of {len(shards.index.shards)} shards have no block"
                " checksums, so a flipped bit is not detected when read; build the data set again to add them"
            )
        return shards

    @property
    def location(self) -> str:
        """The folder or address of the data set."""
        return self.reader.location

    @property
    def tokens(self) -> int:
        """Tokens in all shards."""
        return self.index.tokens

    @property
    def vocabulary(self) -> int:
        """Every token is below this: the smallest vocabulary a model may have."""
        return self.index.vocabulary

    @property
    def newest_version(self) -> int:
        """Number of the newest version."""
        return len(self.index.all_versions) - 1

    def num_samples(self, length: int, version: int = -1) -> int:
        """Full samples of `length` tokens and one more target; up to `length - 1` tokens at the end stay unread."""
        return (self.index.all_versions[version].tokens - 1) // length

    def refresh(self) -> None:
        """Read the index again, to see what was appended; a replaced data set is an error."""
        newer = self.reader.read_index()
        if not newer.extends(self.index):
            message = "was replaced while it was being read; the shards now belong to another data set"
            raise SpecError([dataset_problem(self.location, INDEX_FILE, "file", message, "start the run again")])
        self._set_index(newer)

    def shard_slices(self, start: int, count: int) -> list[ShardSlice]:
        """Where the tokens start … start + count - 1 are stored."""
        index, ends = self.index, self._ends
        if start < 0 or count < 0 or start + count > index.tokens:
            raise ValueError(f"tokens {start} to {start + count} are not within the {index.tokens} of {self.location}")
        size = disk_dtype(index.dtype).itemsize
        found, stop, number = [], start + count, bisect_right(ends, start)
        while start < stop:
            first = ends[number] - index.shards[number].tokens
            piece = min(stop, ends[number]) - start
            found.append(ShardSlice(number, (start - first) * size, piece * size))
            start, number = start + piece, number + 1
        return found

    def read(self, start: int, count: int) -> IntArray:
        """Tokens start … start + count - 1, across shards if need be."""
        words = self._read_stored(start, count)
        return words >> MARK_BITS if self.index.has_loss_mask else words

    def read_words(self, start: int, count: int) -> IntArray:
        """The same with their marks (`token_marks`): in text, every end-of-text token ends a document."""
        words = self._read_stored(start, count)
        return words if self.index.has_loss_mask else pack_marks(words, words == self.index.end_of_text)

    def prefetch(self, starts: Sequence[int], count: int) -> None:
        """Prefetch several ranges of `count` tokens, all at once if they are remote."""
        try:
            self.reader.prefetch([span for start in starts for span in self.shard_slices(start, count)])
        except CorruptBlockError as error:
            raise SpecError([self._corruption_problem(error)]) from None

    def document_spans(self, start: int, count: int) -> list[DocumentSpan]:
        """The documents that these tokens are part of."""
        if not all(shard.ends for shard in self.index.shards):
            ends = (np.flatnonzero(self.read(start, count) == self.index.end_of_text) + 1 + start).tolist()
            first = None
        else:
            ends = [
                end
                for number in {span.shard for span in self.shard_slices(start, count)}
                for end in self._ends_of(number)
            ]
            first = self.document_at(start)
        edges = [start, *sorted(end for end in ends if start < end < start + count), start + count]
        return [
            DocumentSpan(None if first is None else first + number, edge, edges[number + 1] - edge)
            for number, edge in enumerate(edges[:-1])
        ]

    def document_at(self, token: int) -> int:
        """Number of the document that a token belongs to; its end-of-text token is its last."""
        number = bisect_right(self._ends, token)
        before = sum(shard.documents for shard in self.index.shards[:number])
        return before + bisect_right(self._ends_of(number), token)

    def token_counts(self, version: int) -> NDArray[np.int64]:
        """How often each token occurs in a version; counted again if the data set does not record it."""
        described = self.index.all_versions[version]
        if described.counts:
            raw = self.reader.read_sidecar(token_counts_file(range(self.newest_version + 1)[version]), described.counts)
            return np.frombuffer(raw, dtype="<i8").astype(np.int64)
        counts = np.zeros(self.vocabulary, dtype=np.int64)
        for start in range(0, described.tokens, READ_CHUNK_BYTES):
            tokens = self.read(start, min(READ_CHUNK_BYTES, described.tokens - start))
            counts += np.bincount(tokens, minlength=self.vocabulary)
        return counts

    def verify(self, on_progress: OnProgress = ignore_progress) -> None:
        """Read every file and compare its hash with the index; raises with every one that differs."""
        problems: list[Problem] = []
        total, done = self.tokens * disk_dtype(self.index.dtype).itemsize, 0
        for shard in self.index.shards:
            digest = hashlib.sha256()
            for chunk in self.reader.iter_chunks(shard):
                digest.update(chunk)
                done += len(chunk)
                on_progress(done, total)
            if digest.hexdigest() != shard.sha256:
                message = f"has sha256 {digest.hexdigest()}, but the index says {shard.sha256}"
                problems.append(dataset_problem(self.location, shard.file, "content", message, REBUILD_HINT))
        problems += self._sidecar_problems()
        if problems:
            raise SpecError(problems)

    def _set_index(self, index: DatasetIndex) -> None:
        self.index = index
        self._ends = list(accumulate(shard.tokens for shard in index.shards))

    def _size_problems(self) -> list[Problem]:
        itemsize = disk_dtype(self.index.dtype).itemsize
        found = [self.reader.check_size(shard, shard.tokens * itemsize) for shard in self.index.shards]
        return [problem for problem in found if problem]

    def _sidecar_problems(self) -> list[Problem]:
        named = [(shard.sidecar_name(".crc"), shard.sums) for shard in self.index.shards]
        named += [(shard.sidecar_name(".ends"), shard.ends) for shard in self.index.shards]
        named += [(token_counts_file(number), version.counts) for number, version in enumerate(self.index.editions)]
        problems: list[Problem] = []
        for file, sha256 in named:
            try:
                if sha256:
                    self.reader.read_sidecar(file, sha256)
            except SpecError as error:
                problems += error.problems
        return problems

    def _read_stored(self, start: int, count: int) -> IntArray:
        pieces = [self._read_slice(span).view(disk_dtype(self.index.dtype)) for span in self.shard_slices(start, count)]
        return np.concatenate(pieces).astype(np.int64) if pieces else np.empty(0, dtype=np.int64)

    def _read_slice(self, span: ShardSlice) -> NDArray[np.uint8]:
        while True:
            try:
                return self.reader.read(span)
            except IndexChangedError:
                self.refresh()  # raises unless this is the same data set, or that one plus appends
            except CorruptBlockError as error:
                raise SpecError([self._corruption_problem(error)]) from None

    def _corruption_problem(self, error: CorruptBlockError) -> Problem:
        shard, size = self.index.shards[error.shard], disk_dtype(self.index.dtype).itemsize
        before = self._ends[error.shard] - shard.tokens
        first, last = (
            error.block * CHECKSUM_BLOCK_BYTES // size,
            min((error.block + 1) * CHECKSUM_BLOCK_BYTES // size, shard.tokens) - 1,
        )
        documents = ""
        if all(each.ends for each in self.index.shards):
            documents = f", documents {self.document_at(before + first)} to {self.document_at(before + last)}"
        message = (
            f"is corrupt: its CRC-32C is {error.found:08x}, but {error.expected:08x} was written"
            f" (tokens {before + first} to {before + last}{documents})"
        )
        return dataset_problem(self.location, shard.file, f"block {error.block}", message, REBUILD_HINT)

    def _read_ends(self, number: int) -> list[int]:
        """Positions after the documents that end in a shard, counted over all shards."""
        shard = self.index.shards[number]
        raw = self.reader.read_sidecar(shard.sidecar_name(".ends"), shard.ends)
        ends: list[int] = (np.frombuffer(raw, dtype="<i8") + (self._ends[number] - shard.tokens)).tolist()
        return ends


class ShuffledDataset:
    """The samples of one source: an endless sequence; the trainer keeps the index of the next one, its cursor.

    A sample is `length` tokens and the one after them, so that every position has its target. The sequence depends on
    the shards, the length and the seed alone, never on the number of ranks.
    """

    def __init__(
        self, shards: TokenShards, length: int, seed: int, versions: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """`versions` lists (index, version): from that sample on it is read. Default: the newest from the start."""
        if length < 1:
            raise ValueError(f"`length` must be 1 or more, but is {length} instead")
        self.shards = shards
        self.length = length
        self.seed = seed
        self.versions = tuple(versions) if versions is not None else ((0, shards.newest_version),)
        self.num_samples = shards.num_samples(length, self.versions[-1][1])
        """Samples of one epoch, once the last version is read."""
        if not shards.num_samples(length, self.versions[0][1]):
            tokens = shards.index.all_versions[self.versions[0][1]].tokens
            message = f"holds {tokens} tokens, but one sample of length {length} takes {length + 1}"
            suggestion = f"build it from more text, or set `batch.length` to at most {tokens - 1}"
            raise SpecError([dataset_problem(shards.location, INDEX_FILE, "tokens", message, suggestion)])
        sizes = [(index, shards.num_samples(length, version)) for index, version in self.versions]
        self.shuffle = GrowingShuffle(sizes, seed)

    def sample_ids(self, indices: IntArray) -> IntArray:
        """The sample of the data set at each index: number n is the tokens from n · length on."""
        return self.shuffle.sample_ids(indices)

    def read_samples(self, indices: IntArray) -> IntArray:
        """Samples at these indices of the sequence, as rows of `length + 1` tokens: int64 [n, length + 1]."""
        return self._read_rows(indices, self.shards.read)

    def read_words(self, indices: IntArray) -> IntArray:
        """The same with their marks (`token_marks`)."""
        return self._read_rows(indices, self.shards.read_words)

    def _read_rows(self, indices: IntArray, read: Callable[[int, int], IntArray]) -> IntArray:
        rows = np.empty((len(indices), self.length + 1), dtype=np.int64)
        starts = (self.sample_ids(indices) * self.length).tolist()
        self.shards.prefetch(starts, self.length + 1)
        for row, start in zip(rows, starts, strict=True):
            row[:] = read(start, self.length + 1)
        return rows


def rank_sample_indices(cursor: int, sequences: int, rank: int = 0, ranks: int = 1) -> IntArray:
    """Indices of one rank's rows in the batch cursor … cursor + sequences - 1; the ranks in order make up the batch."""
    if not 0 <= rank < ranks:
        raise ValueError(f"`rank` must be from 0 to {ranks - 1}, but is {rank} instead")
    if sequences % ranks:
        raise ValueError(f"`sequences` must divide by the {ranks} data ranks, but is {sequences} instead")
    per_rank = sequences // ranks
    return np.arange(cursor + rank * per_rank, cursor + (rank + 1) * per_rank, dtype=np.int64)
