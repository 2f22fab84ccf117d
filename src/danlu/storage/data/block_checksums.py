"""One checksum per block, so that a random read is verified at the cost of the block that contains it."""

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from danlu.storage.data.dataset_index import CHECKSUM_BLOCK_BYTES

Checksums = NDArray[np.uint32]
ByteArray = NDArray[np.uint8]

_LITTLE_ENDIAN_U32 = np.dtype("<u4")


class BlockChecksums:
    """Checksums of every block of a file, computed as it is written."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._block_bytes = 0
        self._sum = 0

    def update(self, raw: bytes) -> None:
        """Add the next bytes."""
        view = memoryview(raw)
        while len(view):
            piece, view = (
                view[: CHECKSUM_BLOCK_BYTES - self._block_bytes],
                view[CHECKSUM_BLOCK_BYTES - self._block_bytes :],
            )
            self._sum = google_crc32c.extend(self._sum, bytes(piece))
            self._block_bytes += len(piece)
            if self._block_bytes == CHECKSUM_BLOCK_BYTES:
                self._finish_block()

    def to_bytes(self) -> bytes:
        """The content of the `.crc` file."""
        if self._block_bytes:
            self._finish_block()
        return np.array(self._sums, dtype=_LITTLE_ENDIAN_U32).tobytes()

    def _finish_block(self) -> None:
        self._sums.append(self._sum)
        self._block_bytes = self._sum = 0


def parse_checksums(raw: bytes) -> Checksums:
    """The checksums in a `.crc` file."""
    return np.frombuffer(raw, dtype=_LITTLE_ENDIAN_U32).astype(np.uint32)


def block_crc32c(raw: bytes) -> int:
    """The CRC-32C of one block."""
    return int(google_crc32c.value(raw))


def block_range(offset: int, count: int) -> range:
    """Indices of the blocks that `count` bytes from `offset` on touch."""
    return range(offset // CHECKSUM_BLOCK_BYTES, -(-(offset + count) // CHECKSUM_BLOCK_BYTES)) if count else range(0)


class VerifiedBlocks:
    """Which blocks of a file have been verified: one bit each."""

    def __init__(self, blocks: int) -> None:
        self._bits: ByteArray = np.zeros(-(-blocks // 8), dtype=np.uint8)

    def __contains__(self, block: int) -> bool:
        return bool(self._bits[block >> 3] >> (block & 7) & 1)

    def add(self, block: int) -> None:
        """Add a block; with two threads at once one may be lost, which only costs a second verification."""
        self._bits[block >> 3] |= 1 << (block & 7)
