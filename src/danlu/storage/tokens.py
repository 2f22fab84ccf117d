"""Token shards, and the samples a run reads from them."""

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
from danlu.storage.growth import GrowingOrder
from danlu.storage.index import BLOCK, INDEX, REBUILD, Index, counts_file, on_disk
from danlu.storage.order import Ints
from danlu.storage.shard_files import (
    CHUNK,
    DamagedBlockError,
    IndexChangedError,
    LocalFiles,
    ShardFiles,
    Span,
    problem_in,
)

OnProgress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""
OnWarning = Callable[[str], None]

_SIDE_FILES = 64  # tables of document ends held in memory: 8 bytes a document


def no_progress(done: int, total: int) -> None:
    """Report nothing."""


def python_warning(message: str) -> None:
    """Warn as Python does; a run writes an event instead."""
    warnings.warn(message, stacklevel=3)


class Part(NamedTuple):
    """What a run of tokens holds of one document."""

    document: int | None
    """Its number in the data set, or None where the data set does not say."""
    start: int
    """First token of the part, counted over all shards."""
    tokens: int


class TokenShards:
    """A data set, of which any tokens can be read; what is read is what was built, or an error."""

    def __init__(self, files: ShardFiles, index: Index) -> None:
        """Take an index as it is; use `open` for a folder."""
        self.files = files
        self._adopt(index)
        self._ends_of = lru_cache(maxsize=_SIDE_FILES)(self._read_ends)

    @classmethod
    def open(cls, folder: Path, *, check_sizes: bool = True, on_warning: OnWarning = python_warning) -> Self:
        """Open a data set; checks that every shard has its size. Content is checked when read, all of it by `verify`.

        One rank checking all sizes is enough, and spares the file system a look at every file from every
        rank; the others pass False, since a shard is checked again when it is first read.
        """
        return cls.over(LocalFiles(folder), check_sizes=check_sizes, on_warning=on_warning)

    @classmethod
    def over(cls, files: ShardFiles, *, check_sizes: bool = True, on_warning: OnWarning = python_warning) -> Self:
        """Open the data set that these files are."""
        shards = cls(files, files.index())
        if check_sizes and (problems := shards._wrong_sizes()):
            raise SpecError(problems)
        if check_sizes and (bare := sum(not shard.sums for shard in shards.index.shards)):
            on_warning(
                f"{files.where}: {bare} of {len(shards.index.shards)} shards have no checksums of blocks, so that a"
                " flipped bit is not noticed on reading; build the data set again to have them"
            )
        return shards

    @property
    def where(self) -> str:
        """The folder or address of the data set."""
        return self.files.where

    @property
    def tokens(self) -> int:
        """Tokens in all shards."""
        return self.index.tokens

    @property
    def vocabulary(self) -> int:
        """Every token is below this: the least vocabulary a model must have."""
        return self.index.vocabulary

    @property
    def newest(self) -> int:
        """Number of the newest edition."""
        return len(self.index.all_editions) - 1

    def samples(self, length: int, edition: int = -1) -> int:
        """Whole samples of `length` tokens and one more target; up to `length - 1` tokens at the end stay unread."""
        return (self.index.all_editions[edition].tokens - 1) // length

    def refresh(self) -> None:
        """Take up what was appended meanwhile; a data set that was replaced by another is an error."""
        newer = self.files.index()
        if not newer.extends(self.index):
            message = "was replaced while it was being read; the shards belong to another data set now"
            raise SpecError([problem_in(self.where, INDEX, "file", message, "start the run again")])
        self._adopt(newer)

    def spans(self, start: int, count: int) -> list[Span]:
        """Where the tokens start … start + count - 1 lie."""
        index, ends = self.index, self._ends
        if start < 0 or count < 0 or start + count > index.tokens:
            raise ValueError(f"tokens {start} to {start + count} are not within the {index.tokens} of {self.where}")
        size = on_disk(index.dtype).itemsize
        found, stop, number = [], start + count, bisect_right(ends, start)
        while start < stop:
            first = ends[number] - index.shards[number].tokens
            piece = min(stop, ends[number]) - start
            found.append(Span(number, (start - first) * size, piece * size))
            start, number = start + piece, number + 1
        return found

    def read(self, start: int, count: int) -> Ints:
        """Tokens start … start + count - 1, across shards where they lie so."""
        pieces = [self._bytes(span).view(on_disk(self.index.dtype)) for span in self.spans(start, count)]
        return np.concatenate(pieces).astype(np.int64) if pieces else np.empty(0, dtype=np.int64)

    def prepare(self, starts: Sequence[int], count: int) -> None:
        """Have several runs of `count` tokens at hand, all of them fetched at once where they come from afar."""
        try:
            self.files.prepare([span for start in starts for span in self.spans(start, count)])
        except DamagedBlockError as error:
            raise SpecError([self._damage(error)]) from None

    def parts(self, start: int, count: int) -> list[Part]:
        """The documents that these tokens hold parts of."""
        if not all(shard.ends for shard in self.index.shards):
            cuts = (np.flatnonzero(self.read(start, count) == self.index.end_of_text) + 1 + start).tolist()
            first = None
        else:
            cuts = [
                cut for number in {span.shard for span in self.spans(start, count)} for cut in self._ends_of(number)
            ]
            first = self.document_at(start)
        edges = [start, *sorted(cut for cut in cuts if start < cut < start + count), start + count]
        return [
            Part(None if first is None else first + number, edge, edges[number + 1] - edge)
            for number, edge in enumerate(edges[:-1])
        ]

    def document_at(self, token: int) -> int:
        """Number of the document that a token belongs to; its own end is its last token."""
        number = bisect_right(self._ends, token)
        before = sum(shard.documents for shard in self.index.shards[:number])
        return before + bisect_right(self._ends_of(number), token)

    def counts(self, edition: int) -> NDArray[np.int64]:
        """How often each token occurs in an edition; counted anew where the data set does not say."""
        described = self.index.all_editions[edition]
        if described.counts:
            raw = self.files.whole(counts_file(range(self.newest + 1)[edition]), described.counts)
            return np.frombuffer(raw, dtype="<i8").astype(np.int64)
        counts = np.zeros(self.vocabulary, dtype=np.int64)
        for start in range(0, described.tokens, CHUNK):
            tokens = self.read(start, min(CHUNK, described.tokens - start))
            counts += np.bincount(tokens, minlength=self.vocabulary)
        return counts

    def verify(self, on_progress: OnProgress = no_progress) -> None:
        """Read every file and compare its hash with the index; raises with every one that differs."""
        problems: list[Problem] = []
        total, done = self.tokens * on_disk(self.index.dtype).itemsize, 0
        for shard in self.index.shards:
            digest = hashlib.sha256()
            for chunk in self.files.chunks(shard):
                digest.update(chunk)
                done += len(chunk)
                on_progress(done, total)
            if digest.hexdigest() != shard.sha256:
                message = f"has sha256 {digest.hexdigest()}, but the index says {shard.sha256}"
                problems.append(problem_in(self.where, shard.file, "content", message, REBUILD))
        problems += self._bad_side_files()
        if problems:
            raise SpecError(problems)

    def _adopt(self, index: Index) -> None:
        self.index = index
        self._ends = list(accumulate(shard.tokens for shard in index.shards))

    def _wrong_sizes(self) -> list[Problem]:
        itemsize = on_disk(self.index.dtype).itemsize
        found = [self.files.wrong_size(shard, shard.tokens * itemsize) for shard in self.index.shards]
        return [problem for problem in found if problem]

    def _bad_side_files(self) -> list[Problem]:
        named = [(shard.beside(".crc"), shard.sums) for shard in self.index.shards]
        named += [(shard.beside(".ends"), shard.ends) for shard in self.index.shards]
        named += [(counts_file(number), edition.counts) for number, edition in enumerate(self.index.editions)]
        problems: list[Problem] = []
        for file, sha256 in named:
            try:
                if sha256:
                    self.files.whole(file, sha256)
            except SpecError as error:
                problems += error.problems
        return problems

    def _bytes(self, span: Span) -> NDArray[np.uint8]:
        while True:
            try:
                return self.files.read(span)
            except IndexChangedError:
                self.refresh()  # raises unless what is here is what was, and more
            except DamagedBlockError as error:
                raise SpecError([self._damage(error)]) from None

    def _damage(self, error: DamagedBlockError) -> Problem:
        shard, size = self.index.shards[error.shard], on_disk(self.index.dtype).itemsize
        before = self._ends[error.shard] - shard.tokens
        first, last = error.block * BLOCK // size, min((error.block + 1) * BLOCK // size, shard.tokens) - 1
        documents = ""
        if all(each.ends for each in self.index.shards):
            documents = f", documents {self.document_at(before + first)} to {self.document_at(before + last)}"
        message = (
            f"is damaged: its CRC-32C is {error.found:08x}, but {error.expected:08x} was written"
            f" (tokens {before + first} to {before + last}{documents})"
        )
        return problem_in(self.where, shard.file, f"block {error.block}", message, REBUILD)

    def _read_ends(self, number: int) -> list[int]:
        """Places behind the documents that end in a shard, counted over all shards."""
        shard = self.index.shards[number]
        raw = self.files.whole(shard.beside(".ends"), shard.ends)
        ends: list[int] = (np.frombuffer(raw, dtype="<i8") + (self._ends[number] - shard.tokens)).tolist()
        return ends


class Dataset:
    """The samples of one source: an endless sequence of which the trainer keeps the index of the next one, its cursor.

    A sample is `length` tokens and the one after them, so that every position has its target. The sequence
    depends on the shards, the length and the seed alone, never on the number of ranks.
    """

    def __init__(
        self, shards: TokenShards, length: int, seed: int, editions: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """`editions` lists (index, edition): from that sample on it counts. The newest from the start if left out."""
        if length < 1:
            raise ValueError(f"`length` must be 1 or more, but is {length} instead")
        self.shards = shards
        self.length = length
        self.seed = seed
        self.editions = tuple(editions) if editions is not None else ((0, shards.newest),)
        self.samples = shards.samples(length, self.editions[-1][1])
        """Samples of one epoch, once all editions count."""
        if not shards.samples(length, self.editions[0][1]):
            tokens = shards.index.all_editions[self.editions[0][1]].tokens
            message = f"holds {tokens} tokens, but one sample of length {length} takes {length + 1}"
            suggestion = f"build it from more text, or set `batch.length` to at most {tokens - 1}"
            raise SpecError([problem_in(shards.where, INDEX, "tokens", message, suggestion)])
        sizes = [(place, shards.samples(length, edition)) for place, edition in self.editions]
        self.order = GrowingOrder(sizes, seed)

    def numbers(self, indices: Ints) -> Ints:
        """Which sample of the data set stands at each index: number n is the tokens from n · length on."""
        return self.order.at(indices)

    def at(self, indices: Ints) -> Ints:
        """Samples at these indices of the sequence, as rows of `length + 1` tokens: int64 [n, length + 1]."""
        rows = np.empty((len(indices), self.length + 1), dtype=np.int64)
        starts = (self.numbers(indices) * self.length).tolist()
        self.shards.prepare(starts, self.length + 1)
        for row, start in zip(rows, starts, strict=True):
            row[:] = self.shards.read(start, self.length + 1)
        return rows


def batch_rows(cursor: int, sequences: int, rank: int = 0, ranks: int = 1) -> Ints:
    """Indices of one rank's rows in the batch cursor … cursor + sequences - 1; the ranks in order make up the batch."""
    if not 0 <= rank < ranks:
        raise ValueError(f"`rank` must be from 0 to {ranks - 1}, but is {rank} instead")
    if sequences % ranks:
        raise ValueError(f"`sequences` must divide by the {ranks} data ranks, but is {sequences} instead")
    share = sequences // ranks
    return np.arange(cursor + rank * share, cursor + (rank + 1) * share, dtype=np.int64)
