"""crc32c of memory, and a copy that computes it on the way.

A checksum of what a disk returned proves only that the disk agrees with itself. `copy_with_crc32c` computes it from
the source while that is copied for a checkpoint, in the time of the copy.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Protocol

import google_crc32c

from danlu.native import NativeUnavailableError, native_or_portable
from danlu.storage.store.direct_io import buffer_address
from danlu.storage.store.safe_path import Buffer, byte_view

_BLOCK_BYTES = 1 << 20  # stays in a core's own cache between being copied and being hashed


class _Crc32cBackend(Protocol):
    """Two implementations: one pass in C, or block by block."""

    def crc32c(self, start: int, data: memoryview) -> int: ...

    def copy(self, source: memoryview, target: memoryview) -> int: ...


def crc32c(data: Buffer, start: int = 0) -> int:
    """Return the crc32c (RFC 3720) of a buffer; of two in a row with `crc32c(second, crc32c(first))`.

    Other threads run meanwhile.
    """
    return _crc32c_backend().crc32c(start, byte_view(data))


def copy_with_crc32c(source: Buffer, target: Buffer) -> int:
    """Copy `source` to `target`, of the same length and apart from it, and return the crc32c of the source.

    Other threads run meanwhile; none of them may change the source. Takes the time of a copy where the C code
    was compiled and the processor has crc32 instructions, and about twice that elsewhere, with one warning.
    """
    origin, copy = byte_view(source), byte_view(target)
    if copy.readonly and len(copy):
        raise ValueError("`target` must be writable, but is read-only")
    if len(origin) != len(copy):
        raise ValueError(f"`target` must have the {len(origin)} bytes of `source`, but has {len(copy)} instead")
    if not len(origin):
        return 0
    if abs(buffer_address(origin) - buffer_address(copy)) < len(origin):
        raise ValueError("`source` and `target` must not overlap")
    return _crc32c_backend().copy(origin, copy)


class NativeCrc32c:
    """The C code of `native/copy_hash.c`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        if not library.danlu_supported():
            raise NativeUnavailableError(
                "this processor has no crc32 instructions that are known here (SSE 4.2, ARMv8 CRC)"
            )
        library.danlu_init()
        self._copy = _declare(library.danlu_copy_crc32c, ctypes.c_void_p, ctypes.c_void_p)
        self._crc32c = _declare(library.danlu_crc32c, ctypes.c_void_p)

    def crc32c(self, start: int, data: memoryview) -> int:
        """Hash in place."""
        return self._crc32c(start, buffer_address(data), len(data)) if len(data) else start

    def copy(self, source: memoryview, target: memoryview) -> int:
        """Copy and hash in one pass."""
        return self._copy(0, buffer_address(target), buffer_address(source), len(source))


class PortableCrc32c:
    """google-crc32c, and copies by Python: where the C code was not compiled or cannot run."""

    def crc32c(self, start: int, data: memoryview) -> int:
        """Hash block by block, because the library only accepts `bytes`."""
        for begin in range(0, len(data), _BLOCK_BYTES):
            start = google_crc32c.extend(start, bytes(data[begin : begin + _BLOCK_BYTES]))
        return start

    def copy(self, source: memoryview, target: memoryview) -> int:
        """Copy block by block and hash each while it is in the cache."""
        crc = 0
        for begin in range(0, len(source), _BLOCK_BYTES):
            block = bytes(source[begin : begin + _BLOCK_BYTES])
            target[begin : begin + _BLOCK_BYTES] = block
            crc = google_crc32c.extend(crc, block)
        return crc


@functools.cache
def _crc32c_backend() -> _Crc32cBackend:
    cost = "checksums are not computed while copying, and staging takes about twice as long"
    return native_or_portable("copy_hash", NativeCrc32c, PortableCrc32c, cost)


def _declare(function: Any, *pointers: type[ctypes.c_void_p]) -> Callable[..., int]:
    function.argtypes = [ctypes.c_uint32, *pointers, ctypes.c_size_t]
    function.restype = ctypes.c_uint32
    return function
