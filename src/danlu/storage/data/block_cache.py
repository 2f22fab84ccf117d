"""Blocks of shards cached on a local disk: bounded, shared by all processes of a machine, and never trusted.

Eight-way set associative: one file of blocks and one of tags. When its set is full, a block replaces the least recently
used one. No lock and no order of writes is needed, because a block is valid only if it has the checksum that the data
set records: what two processes wrote into one entry at once, what a crash truncated, and what a bad disk changed are
all cache misses.
"""

import hashlib
import os
import time
from pathlib import Path

import numpy as np

from danlu.storage.data.block_checksums import block_crc32c
from danlu.storage.data.dataset_index import CHECKSUM_BLOCK_BYTES

_WAYS = 8
_TAG_DTYPE = np.dtype([("key", "<u8"), ("used", "<i8")])
MIN_CACHE_BYTES = _WAYS * CHECKSUM_BLOCK_BYTES
"""Bytes of the smallest cache."""


class BlockCache:
    """At most `size` bytes of blocks in a folder."""

    def __init__(self, folder: Path, size: int) -> None:
        """All processes that share a folder must give the same size; files of another size are removed."""
        if size < MIN_CACHE_BYTES:
            raise ValueError(f"`size` must be {MIN_CACHE_BYTES} bytes or more, but is {size} instead")
        folder.mkdir(parents=True, exist_ok=True)
        self.num_sets = size // MIN_CACHE_BYTES
        blocks, tags = folder / f"blocks-{self.num_sets}.bin", folder / f"tags-{self.num_sets}.bin"
        for old in (*folder.glob("blocks-*.bin"), *folder.glob("tags-*.bin")):
            if old not in (blocks, tags):
                old.unlink(missing_ok=True)
        self._blocks = os.open(blocks, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._blocks, self.num_sets * MIN_CACHE_BYTES)
        tags_bytes = self.num_sets * _WAYS * _TAG_DTYPE.itemsize
        descriptor = os.open(tags, os.O_RDWR | os.O_CREAT, 0o644)
        try:  # a hole in a mapped file on a full disk would kill the process
            os.posix_fallocate(descriptor, 0, tags_bytes)
        finally:
            os.close(descriptor)
        self._tags = np.memmap(tags, dtype=_TAG_DTYPE, mode="r+", shape=(self.num_sets, _WAYS))

    def get(self, content: str, block: int, length: int, expected: int) -> bytes | None:
        """A block of the file with hash `content`, if it is cached with the expected checksum."""
        key = _key(content, block)
        row = self._tags[key % self.num_sets]
        for way in np.flatnonzero(row["key"] == key).tolist():
            raw = os.pread(self._blocks, length, self._offset(key, way))
            if len(raw) == length and block_crc32c(raw) == expected:
                row["used"][way] = time.time_ns()
                return raw
            row["key"][way] = 0
        return None

    def put(self, content: str, block: int, raw: bytes) -> None:
        """Store a block, evicting the least recently used one if its set is full."""
        key = _key(content, block)
        row = self._tags[key % self.num_sets]
        same = np.flatnonzero(row["key"] == key)
        way = int(same[0]) if same.size else int(np.argmin(np.where(row["key"] == 0, 0, row["used"])))
        row["key"][way] = 0
        os.pwrite(self._blocks, raw, self._offset(key, way))
        row["used"][way] = time.time_ns()
        row["key"][way] = key

    def _offset(self, key: int, way: int) -> int:
        return ((key % self.num_sets) * _WAYS + way) * CHECKSUM_BLOCK_BYTES


def _key(content: str, block: int) -> int:
    """64-bit key of a block; 0 marks an empty entry. Two blocks with the same key differ in their checksums."""
    digest = hashlib.blake2b(f"{content}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1
