"""A checksum a block, so that a random read is checked at the price of the block it falls in."""

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from danlu.storage.index import BLOCK

Sums = NDArray[np.uint32]
Raw = NDArray[np.uint8]

_LITTLE = np.dtype("<u4")


class BlockSums:
    """Takes the bytes of a file as they are written, and has the sum of every block at the end."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._held = 0
        self._sum = 0

    def update(self, raw: bytes) -> None:
        """Take the next bytes."""
        view = memoryview(raw)
        while len(view):
            piece, view = view[: BLOCK - self._held], view[BLOCK - self._held :]
            self._sum = google_crc32c.extend(self._sum, bytes(piece))
            self._held += len(piece)
            if self._held == BLOCK:
                self._close()

    def table(self) -> bytes:
        """What a `.crc` file holds."""
        if self._held:
            self._close()
        return np.array(self._sums, dtype=_LITTLE).tobytes()

    def _close(self) -> None:
        self._sums.append(self._sum)
        self._held = self._sum = 0


def read_table(raw: bytes) -> Sums:
    """The sums in a `.crc` file."""
    return np.frombuffer(raw, dtype=_LITTLE).astype(np.uint32)


def sum_of(raw: bytes) -> int:
    """The CRC-32C of one block."""
    return int(google_crc32c.value(raw))


def blocks_of(offset: int, count: int) -> range:
    """Numbers of the blocks that `count` bytes from `offset` on touch."""
    return range(offset // BLOCK, -(-(offset + count) // BLOCK)) if count else range(0)


class Seen:
    """Which blocks of a file have been checked: one bit each."""

    def __init__(self, blocks: int) -> None:
        self._bits: Raw = np.zeros(-(-blocks // 8), dtype=np.uint8)

    def __contains__(self, block: int) -> bool:
        return bool(self._bits[block >> 3] >> (block & 7) & 1)

    def add(self, block: int) -> None:
        """Note a block; two threads at once may lose a note, which costs a second check and nothing else."""
        self._bits[block >> 3] |= 1 << (block & 7)
