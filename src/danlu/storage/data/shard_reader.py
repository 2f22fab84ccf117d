"""The files of a data set in a local folder; every block is verified when it is first read."""

import errno
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
from danlu.storage.data.block_checksums import (
    ByteArray,
    Checksums,
    VerifiedBlocks,
    block_crc32c,
    block_range,
    parse_checksums,
)
from danlu.storage.data.dataset_index import (
    CHECKSUM_BLOCK_BYTES,
    INDEX_FILE,
    REBUILD_HINT,
    DatasetIndex,
    ShardInfo,
    disk_dtype,
    read_index,
)
from danlu.storage.store.atomic_files import fsync_dir

READ_CHUNK_BYTES = 8 << 20
_FSYNC_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EINVAL, errno.EROFS)
_MAX_OPEN_SHARDS = 64  # a map holds a file descriptor, and a process often has only 1024


class ShardSlice(NamedTuple):
    """Bytes of one shard."""

    shard: int
    offset: int
    length: int


class ShardReader(Protocol):
    """Source of the bytes of a data set."""

    location: str
    """Folder or address, for messages."""

    def read_index(self) -> DatasetIndex:
        """Read the current index."""
        ...

    def sync(self) -> None:
        """Wait until the index last read is durable: a visible index may not be."""
        ...

    def check_size(self, shard: ShardInfo, expected: int) -> Problem | None:
        """A problem if a shard does not have the expected size."""
        ...

    def read_sidecar(self, file: str, sha256: str) -> bytes:
        """A small file of the data set, verified against its hash."""
        ...

    def iter_chunks(self, shard: ShardInfo) -> Iterator[bytes]:
        """All bytes of a shard in order, not verified."""
        ...

    def prefetch(self, spans: Sequence[ShardSlice]) -> None:
        """Prefetch these bytes if they are remote."""
        ...

    def read(self, span: ShardSlice) -> ByteArray:
        """Bytes of a shard of the index last read, as written; else `CorruptBlockError` or `IndexChangedError`."""
        ...


class CorruptBlockError(Exception):
    """A block is not what was written; `TokenShards` reports which documents are in it."""

    def __init__(self, shard: int, block: int, found: int, expected: int) -> None:
        super().__init__(f"block {block} of shard {shard} has CRC-32C {found:08x}, not {expected:08x}")
        self.shard, self.block, self.found, self.expected = shard, block, found, expected


class IndexChangedError(Exception):
    """The index is not the one last read: something was appended, or the data set was replaced."""


@dataclass(frozen=True)
class _MappedShard:
    raw: ByteArray
    sums: Checksums | None
    seen: VerifiedBlocks


class LocalShardReader:
    """A folder, read through memory maps; a shard is opened at its first read."""

    def __init__(self, folder: Path) -> None:
        self.location = str(folder)
        self._folder = folder
        self._identity: tuple[int, int, int] | None = None
        self._index: DatasetIndex | None = None
        self._seen: dict[int, VerifiedBlocks] = {}
        self._map = lru_cache(maxsize=_MAX_OPEN_SHARDS)(self._open)
        self._opening = threading.Lock()

    def read_index(self) -> DatasetIndex:
        """Read the current index."""
        self._identity = _file_identity(self._folder / INDEX_FILE)
        self._index = read_index(self._folder)
        return self._index

    def sync(self) -> None:
        """Wait until the index last read is durable; a folder that may not be fsynced is not ours."""
        try:
            fsync_dir(self._folder)
        except OSError as error:
            if error.errno not in _FSYNC_NOT_ALLOWED:
                raise

    def check_size(self, shard: ShardInfo, expected: int) -> Problem | None:
        """A problem if a shard does not have the expected size."""
        return size_problem(self._folder / shard.file, expected)

    def read_sidecar(self, file: str, sha256: str) -> bytes:
        """A small file of the data set, verified against its hash."""
        path = self._folder / file
        try:
            raw = path.read_bytes()
        except OSError as error:
            message = f"cannot be read: {error.strerror}"
            raise SpecError([problem_at(path, 1, "file", message, REBUILD_HINT)]) from None
        check_sha256(self.location, file, raw, sha256)
        return raw

    def iter_chunks(self, shard: ShardInfo) -> Iterator[bytes]:
        """All bytes of a shard in order, not verified."""
        with (self._folder / shard.file).open("rb") as file:
            while chunk := file.read(READ_CHUNK_BYTES):
                yield chunk

    def prefetch(self, spans: Sequence[ShardSlice]) -> None:
        """Nothing to do: pages are read when they are touched."""

    def read(self, span: ShardSlice) -> ByteArray:
        """Bytes of a shard; each block is verified when this process first reads it."""
        with self._opening:
            shard = self._map(span.shard)
        if shard.sums is not None:
            for block in block_range(span.offset, span.length):
                if block not in shard.seen:
                    found = block_crc32c(
                        shard.raw[block * CHECKSUM_BLOCK_BYTES : (block + 1) * CHECKSUM_BLOCK_BYTES].tobytes()
                    )
                    if found != shard.sums[block]:
                        raise CorruptBlockError(span.shard, block, found, int(shard.sums[block]))
                    shard.seen.add(block)
        return shard.raw[span.offset : span.offset + span.length]

    def _open(self, number: int) -> _MappedShard:
        if _file_identity(self._folder / INDEX_FILE) != self._identity:
            raise IndexChangedError
        assert self._index is not None  # a slice comes from an index
        shard = self._index.shards[number]
        size = shard.tokens * disk_dtype(self._index.dtype).itemsize
        if problem := self.check_size(shard, size):
            raise SpecError([problem])
        raw = np.memmap(self._folder / shard.file, dtype=np.uint8, mode="r")
        sums = parse_checksums(self.read_sidecar(shard.sidecar_name(".crc"), shard.sums)) if shard.sums else None
        return _MappedShard(raw, sums, self._seen.setdefault(number, VerifiedBlocks(-(-size // CHECKSUM_BLOCK_BYTES))))


def dataset_problem(where: str, file: str, key: str, message: str, suggestion: str = "") -> Problem:
    """A problem with a file of a data set in a folder or a store."""
    return Problem(file=f"{where}/{file}" if file else where, line=1, key=key, message=message, suggestion=suggestion)


def check_sha256(where: str, file: str, raw: bytes, sha256: str) -> None:
    """Raise if the bytes of a file do not have this hash."""
    if (found := hashlib.sha256(raw).hexdigest()) != sha256:
        message = f"has sha256 {found}, but the index says {sha256}"
        raise SpecError([dataset_problem(where, file, "content", message, REBUILD_HINT)])


def size_problem(path: Path, expected: int) -> Problem | None:
    """A problem if a file does not have this size."""
    try:
        size = path.stat().st_size
    except OSError as error:
        return problem_at(path, 1, "file", f"cannot be read: {error.strerror}", REBUILD_HINT)
    if size == expected:
        return None
    return problem_at(path, 1, "size", f"is {size} bytes, but the index says {expected}", REBUILD_HINT)


def _file_identity(path: Path) -> tuple[int, int, int] | None:
    """Changes when a file is replaced; None when it is gone."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
