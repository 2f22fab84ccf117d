"""crc32c of chunks, alone and on the way of a copy."""

import google_crc32c

from danlu.storage.store import Buffer


def crc32c(data: Buffer) -> int:
    """The checksum of some bytes."""
    return int(google_crc32c.value(bytes(data)))


def copy_and_hash(source: memoryview, target: memoryview) -> int:
    """Copy, and return the checksum of what was copied."""
    target[:] = source
    return crc32c(source)
