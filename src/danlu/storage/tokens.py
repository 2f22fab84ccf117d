"""Token shards on disk, and the samples a run reads from them.

A data set is a folder of raw little-endian tokens (`00000.bin`, …) and an `index.json` that is written last:
a folder without it is not a data set.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from danlu.spec import Problem, SpecError
from danlu.spec.description import Count, Description, Many
from danlu.spec.problem import problem_at
from danlu.storage.order import Ints, shuffled

INDEX = "index.json"
TokenDtype = Literal["uint8", "uint16", "uint32"]
OnProgress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""

_OPEN_SHARDS = 64  # a map holds a file descriptor, of which a process often has 1024
_CHUNK = 8 << 20


def no_progress(done: int, total: int) -> None:
    """Report nothing."""


class Shard(Description):
    """One file of tokens."""

    file: str = Field(pattern=r"^\d{5,}\.bin$")
    tokens: Count
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Index(Description):
    """What `index.json` says of a data set."""

    format: Literal[1] = 1
    tokenizer: str
    """Name of the tokenizer; that of a file carries its hash."""
    vocabulary: Count
    """Token ids are below this. A model may round it up."""
    end_of_text: int = Field(ge=0)
    """Token that ends every document."""
    dtype: TokenDtype
    tokens: Count
    documents: Count
    unigram_loss: float = Field(ge=0, lt=inf)
    """Entropy of the token distribution in nats: the loss of a model that knows how frequent each token is, no more."""
    sources: Many[str]
    shards: Many[Shard] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.dtype != token_dtype(self.vocabulary):
            raise ValueError(f"`dtype` must be {token_dtype(self.vocabulary)} for a vocabulary of {self.vocabulary}")
        if self.end_of_text >= self.vocabulary:
            raise ValueError(f"`end_of_text` must be below the vocabulary of {self.vocabulary}, not {self.end_of_text}")
        if (held := sum(shard.tokens for shard in self.shards)) != self.tokens:
            raise ValueError(f"`tokens` must be what the shards hold, {held}, but is {self.tokens} instead")
        return self


def token_dtype(vocabulary: int) -> TokenDtype:
    """The smallest dtype that holds every id of a vocabulary."""
    if vocabulary > 2**32:
        raise ValueError(f"`vocabulary` must be at most 2^32, but is {vocabulary} instead")
    return "uint8" if vocabulary <= 2**8 else "uint16" if vocabulary <= 2**16 else "uint32"


def on_disk(dtype: TokenDtype) -> "np.dtype[Any]":
    """The dtype in a shard file: little-endian on every machine."""
    return np.dtype(dtype).newbyteorder("<")


class TokenShards:
    """A data set on disk, read through memory maps; opens a shard when a token of it is asked for."""

    def __init__(self, folder: Path, index: Index) -> None:
        """Take an index as it is; use `open` for a folder."""
        self.folder = folder
        self.index = index
        self._dtype = on_disk(index.dtype)
        self._ends = list(accumulate(shard.tokens for shard in index.shards))
        self._identity = _identity(folder / INDEX)
        self._map = lru_cache(maxsize=_OPEN_SHARDS)(self._open_shard)

    @classmethod
    def open(cls, folder: Path, *, check_sizes: bool = True) -> Self:
        """Open a data set; checks that every shard has its size, and leaves the content to `verify`.

        One rank checking all sizes is enough, and spares the file system a look at every file from every
        rank; the others pass False, since a shard is checked again when it is first read.
        """
        index = read_index(folder)
        if not check_sizes:
            return cls(folder, index)
        itemsize = on_disk(index.dtype).itemsize
        problems = [
            problem for shard in index.shards if (problem := _wrong_size(folder / shard.file, shard.tokens * itemsize))
        ]
        if problems:
            raise SpecError(problems)
        return cls(folder, index)

    @property
    def tokens(self) -> int:
        """Tokens in all shards."""
        return self.index.tokens

    @property
    def vocabulary(self) -> int:
        """Every token is below this: the least vocabulary a model must have."""
        return self.index.vocabulary

    def samples(self, length: int) -> int:
        """Whole samples of `length` tokens and one more target; up to `length - 1` tokens at the end stay unread."""
        return (self.tokens - 1) // length

    def read(self, start: int, count: int) -> Ints:
        """Tokens start … start + count - 1, across shards where they lie so."""
        if start < 0 or count < 0 or start + count > self.tokens:
            raise ValueError(f"tokens {start} to {start + count} are not within the {self.tokens} of {self.folder}")
        found = np.empty(count, dtype=np.int64)
        done = 0
        number = bisect_right(self._ends, start)
        while done < count:
            offset = start + done - (self._ends[number] - self.index.shards[number].tokens)
            piece = self._map(number)[offset : offset + count - done]
            found[done : done + len(piece)] = piece
            done += len(piece)
            number += 1
        return found

    def verify(self, on_progress: OnProgress = no_progress) -> None:
        """Read every shard and compare its hash with the index; raises with every shard that differs."""
        problems: list[Problem] = []
        total, done = self.tokens * self._dtype.itemsize, 0
        for shard in self.index.shards:
            path, digest = self.folder / shard.file, hashlib.sha256()
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
                    done += len(chunk)
                    on_progress(done, total)
            if digest.hexdigest() != shard.sha256:
                message = f"has sha256 {digest.hexdigest()}, but the index says {shard.sha256}"
                problems.append(problem_at(path, 1, "content", message, _REBUILD))
        if problems:
            raise SpecError(problems)

    def _open_shard(self, number: int) -> NDArray[Any]:
        if _identity(self.folder / INDEX) != self._identity:
            message = "was replaced while it was being read; the shards belong to another data set now"
            raise SpecError([problem_at(self.folder / INDEX, 1, "file", message, "start the run again")])
        shard = self.index.shards[number]
        path = self.folder / shard.file
        if problem := _wrong_size(path, shard.tokens * self._dtype.itemsize):
            raise SpecError([problem])
        return np.memmap(path, dtype=self._dtype, mode="r")


_REBUILD = "copy it again, or build the data set again with `danlu data build … --force`"


def read_index(folder: Path) -> Index:
    """Read and check `index.json`, or say why the folder is not a data set."""
    path = folder / INDEX
    try:
        text = path.read_bytes()
    except OSError as error:
        message = "is not a data set: " + (f"it has no {INDEX}" if folder.is_dir() else error.strerror or "unreadable")
        raise SpecError([problem_at(folder, 1, "data", message, f"danlu data build SOURCE… -o {folder}")]) from None
    try:
        return Index.model_validate_json(text)
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise SpecError(
            [problem_at(path, 1, ".".join(map(str, each["loc"])) or "file", each["msg"], _REBUILD) for each in details]
        ) from None


def _wrong_size(path: Path, expected: int) -> Problem | None:
    try:
        size = path.stat().st_size
    except OSError as error:
        return problem_at(path, 1, "file", f"cannot be read: {error.strerror}", _REBUILD)
    if size == expected:
        return None
    return problem_at(path, 1, "size", f"is {size} bytes, but the index says {expected}", _REBUILD)


def _identity(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file is replaced; None when it is gone."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


class Dataset:
    """The samples of a run: an endless sequence of which the trainer keeps the index of the next one, its cursor.

    A sample is `length` tokens and the one after them, so that every position has its target. The sequence
    depends on the shards, the length and the seed alone, never on the number of ranks.
    """

    def __init__(self, shards: TokenShards, length: int, seed: int) -> None:
        if length < 1:
            raise ValueError(f"`length` must be 1 or more, but is {length} instead")
        self.shards = shards
        self.length = length
        self.seed = seed
        self.samples = shards.samples(length)
        """Samples of one epoch."""
        if not self.samples:
            message = f"holds {shards.tokens} tokens, but one sample of length {length} takes {length + 1}"
            suggestion = f"build it from more text, or set `batch.length` to at most {shards.tokens - 1}"
            raise SpecError([problem_at(shards.folder / INDEX, 1, "tokens", message, suggestion)])

    def at(self, indices: Ints) -> Ints:
        """Samples at these indices of the sequence, as rows of `length + 1` tokens: int64 [n, length + 1]."""
        rows = np.empty((len(indices), self.length + 1), dtype=np.int64)
        for row, sample in zip(rows, shuffled(indices, self.samples, self.seed).tolist(), strict=True):
            row[:] = self.shards.read(sample * self.length, self.length + 1)
        return rows


def batch_rows(cursor: int, sequences: int, rank: int = 0, ranks: int = 1) -> Ints:
    """Indices of one rank's rows in the batch cursor … cursor + sequences - 1; the ranks in order make up the batch."""
    if not 0 <= rank < ranks:
        raise ValueError(f"`rank` must be from 0 to {ranks - 1}, but is {rank} instead")
    if sequences % ranks:
        raise ValueError(f"`sequences` must divide by the {ranks} data ranks, but is {sequences} instead")
    share = sequences // ranks
    return np.arange(cursor + rank * share, cursor + (rank + 1) * share, dtype=np.int64)
