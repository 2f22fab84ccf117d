"""The files of a data set on this machine's file system, every block checked when it is first read."""

import hashlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from danlu.spec import Problem, SpecError
from danlu.spec.problem import problem_at
from danlu.storage.blocks import Raw, Seen, Sums, blocks_of, read_table, sum_of
from danlu.storage.index import BLOCK, INDEX, REBUILD, Index, Shard, on_disk, read_index

CHUNK = 8 << 20
_OPEN_SHARDS = 64  # a map holds a file descriptor, of which a process often has 1024


class Span(NamedTuple):
    """Bytes of one shard."""

    shard: int
    offset: int
    length: int


class ShardFiles(Protocol):
    """Where the bytes of a data set come from."""

    where: str
    """Folder, or address, that messages name."""

    def index(self) -> Index:
        """The index as it is now."""
        ...

    def wrong_size(self, shard: Shard, expected: int) -> Problem | None:
        """What is wrong with the size of a shard, if something is."""
        ...

    def whole(self, file: str, sha256: str) -> bytes:
        """A small file that belongs to the data set, held against its hash."""
        ...

    def chunks(self, shard: Shard) -> Iterator[bytes]:
        """All bytes of a shard in order, unchecked."""
        ...

    def prepare(self, spans: Sequence[Span]) -> None:
        """Have these bytes at hand, where they come from afar."""
        ...

    def read(self, span: Span) -> Raw:
        """Bytes of a shard of the index last read: what was written, or `DamagedBlockError` or `IndexChangedError`."""
        ...


class DamagedBlockError(Exception):
    """A block is not what was written; `TokenShards` says which documents lie in it."""

    def __init__(self, shard: int, block: int, found: int, expected: int) -> None:
        super().__init__(f"block {block} of shard {shard} has CRC-32C {found:08x}, not {expected:08x}")
        self.shard, self.block, self.found, self.expected = shard, block, found, expected


class IndexChangedError(Exception):
    """The index is another one than was last read: something was appended, or the data set was replaced."""


@dataclass(frozen=True)
class _Open:
    raw: Raw
    sums: Sums | None
    seen: Seen


class LocalFiles:
    """A folder, read through memory maps; a shard is opened when a byte of it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._folder = folder
        self._identity: tuple[int, int, int] | None = None
        self._index: Index | None = None
        self._seen: dict[int, Seen] = {}
        self._map = lru_cache(maxsize=_OPEN_SHARDS)(self._open)
        self._opening = threading.Lock()

    def index(self) -> Index:
        """The index as it is now."""
        self._identity = _identity(self._folder / INDEX)
        self._index = read_index(self._folder)
        return self._index

    def wrong_size(self, shard: Shard, expected: int) -> Problem | None:
        """What is wrong with the size of a shard, if something is."""
        return wrong_size(self._folder / shard.file, expected)

    def whole(self, file: str, sha256: str) -> bytes:
        """A small file that belongs to the data set, held against its hash."""
        path = self._folder / file
        try:
            raw = path.read_bytes()
        except OSError as error:
            message = f"cannot be read: {error.strerror}"
            raise SpecError([problem_at(path, 1, "file", message, REBUILD)]) from None
        check_hash(self.where, file, raw, sha256)
        return raw

    def chunks(self, shard: Shard) -> Iterator[bytes]:
        """All bytes of a shard in order, unchecked."""
        with (self._folder / shard.file).open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk

    def prepare(self, spans: Sequence[Span]) -> None:
        """Nothing to do: the pages are read as they are touched."""

    def read(self, span: Span) -> Raw:
        """Bytes of a shard, each block checked against its sum when this process first reads it."""
        with self._opening:
            shard = self._map(span.shard)
        if shard.sums is not None:
            for block in blocks_of(span.offset, span.length):
                if block not in shard.seen:
                    found = sum_of(shard.raw[block * BLOCK : (block + 1) * BLOCK].tobytes())
                    if found != shard.sums[block]:
                        raise DamagedBlockError(span.shard, block, found, int(shard.sums[block]))
                    shard.seen.add(block)
        return shard.raw[span.offset : span.offset + span.length]

    def _open(self, number: int) -> _Open:
        if _identity(self._folder / INDEX) != self._identity:
            raise IndexChangedError
        assert self._index is not None  # a span comes out of an index
        shard = self._index.shards[number]
        size = shard.tokens * on_disk(self._index.dtype).itemsize
        if problem := self.wrong_size(shard, size):
            raise SpecError([problem])
        raw = np.memmap(self._folder / shard.file, dtype=np.uint8, mode="r")
        sums = read_table(self.whole(shard.beside(".crc"), shard.sums)) if shard.sums else None
        return _Open(raw, sums, self._seen.setdefault(number, Seen(-(-size // BLOCK))))


def problem_in(where: str, file: str, key: str, message: str, suggestion: str = "") -> Problem:
    """A problem with a file of a data set in a folder or a store."""
    return Problem(file=f"{where}/{file}" if file else where, line=1, key=key, message=message, suggestion=suggestion)


def check_hash(where: str, file: str, raw: bytes, sha256: str) -> None:
    """Raise if these are not the bytes of a file with this hash."""
    if (found := hashlib.sha256(raw).hexdigest()) != sha256:
        message = f"has sha256 {found}, but the index says {sha256}"
        raise SpecError([problem_in(where, file, "content", message, REBUILD)])


def wrong_size(path: Path, expected: int) -> Problem | None:
    """A problem if a file does not have this size."""
    try:
        size = path.stat().st_size
    except OSError as error:
        return problem_at(path, 1, "file", f"cannot be read: {error.strerror}", REBUILD)
    if size == expected:
        return None
    return problem_at(path, 1, "size", f"is {size} bytes, but the index says {expected}", REBUILD)


def _identity(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file is replaced; None when it is gone."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
