"""Blocks of shards kept on a local disk: bounded, shared by all processes of a machine, and never trusted.

One file of slots in sets of eight, and one of tags beside it. A block has one set it may lie in; when that is full the
slot used longest ago is taken. There is no lock and no order of writes to get right, because a block counts only if its
sum is the one the data set says: what two processes wrote into one slot at once, what a crash cut off, and what a bad
disk changed are all the same thing, a block that is not there.
"""

import hashlib
import os
import time
from pathlib import Path

import numpy as np

from danlu.storage.blocks import sum_of
from danlu.storage.index import BLOCK

_WAYS = 8
_TAG = np.dtype([("key", "<u8"), ("used", "<i8")])
LEAST = _WAYS * BLOCK
"""Bytes of the smallest cache."""


class BlockCache:
    """At most `size` bytes of blocks in a folder."""

    def __init__(self, folder: Path, size: int) -> None:
        """All processes that share a folder give one size; files of another size are removed."""
        if size < LEAST:
            raise ValueError(f"`size` must be {LEAST} bytes or more, but is {size} instead")
        folder.mkdir(parents=True, exist_ok=True)
        self.sets = size // LEAST
        blocks, tags = folder / f"blocks-{self.sets}.bin", folder / f"tags-{self.sets}.bin"
        for old in (*folder.glob("blocks-*.bin"), *folder.glob("tags-*.bin")):
            if old not in (blocks, tags):
                old.unlink(missing_ok=True)
        self._blocks = os.open(blocks, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._blocks, self.sets * LEAST)
        held = self.sets * _WAYS * _TAG.itemsize
        with tags.open("a+b") as file:
            os.posix_fallocate(file.fileno(), 0, held)  # a hole in a mapped file on a full disk would kill the process
        self._tags = np.memmap(tags, dtype=_TAG, mode="r+", shape=(self.sets, _WAYS))

    def get(self, content: str, block: int, length: int, expected: int) -> bytes | None:
        """A block of the file with hash `content`, if it is here with the sum that is expected."""
        key = _key(content, block)
        row = self._tags[key % self.sets]
        for way in np.flatnonzero(row["key"] == key).tolist():
            raw = os.pread(self._blocks, length, self._offset(key, way))
            if len(raw) == length and sum_of(raw) == expected:
                row["used"][way] = time.time_ns()
                return raw
            row["key"][way] = 0
        return None

    def put(self, content: str, block: int, raw: bytes) -> None:
        """Keep a block, in place of the one used longest ago where there is no room."""
        key = _key(content, block)
        row = self._tags[key % self.sets]
        same = np.flatnonzero(row["key"] == key)
        way = int(same[0]) if same.size else int(np.argmin(np.where(row["key"] == 0, 0, row["used"])))
        row["key"][way] = 0
        os.pwrite(self._blocks, raw, self._offset(key, way))
        row["used"][way] = time.time_ns()
        row["key"][way] = key

    def close(self) -> None:
        """Let go of the files."""
        os.close(self._blocks)
        del self._tags

    def _offset(self, key: int, way: int) -> int:
        return ((key % self.sets) * _WAYS + way) * BLOCK


def _key(content: str, block: int) -> int:
    """64 bits that name a block; 0 marks an empty slot. Two blocks of one name differ in their sums."""
    digest = hashlib.blake2b(f"{content}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1
