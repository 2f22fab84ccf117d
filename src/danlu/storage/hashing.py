"""crc32c of memory, and a copy that takes it on the way.

A checksum is worth what it is taken of: taken from what a disk returned, it proves that the disk agrees with itself.
`copy_and_hash` takes it from the source while the source is being copied for a checkpoint, in the time of the copy.
"""

import ctypes
import functools
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import google_crc32c

from danlu.storage.direct import address
from danlu.storage.native import NoNativeError, load
from danlu.storage.store_path import Buffer, plain

_PIECE = 1 << 20  # stays in a core's own cache between being copied and being hashed


class _Hashing(Protocol):
    """Two ways to do the same: in one pass in C, or piece by piece."""

    def crc32c(self, start: int, data: memoryview) -> int: ...

    def copy(self, source: memoryview, target: memoryview) -> int: ...


def crc32c(data: Buffer, start: int = 0) -> int:
    """Return the crc32c (RFC 3720) of a buffer; of two in a row with `crc32c(second, crc32c(first))`.

    Other threads run meanwhile.
    """
    return _hashing().crc32c(start, plain(data))


def copy_and_hash(source: Buffer, target: Buffer) -> int:
    """Copy `source` to `target`, of the same length and apart from it, and return the crc32c of the source.

    Other threads run meanwhile; none of them may change the source. Costs the time of a copy where a C compiler and a
    processor with crc32 instructions are found, and about twice that elsewhere, which is told once.
    """
    origin, copy = plain(source), plain(target)
    if copy.readonly and len(copy):
        raise ValueError("`target` must be writable, but is read-only")
    if len(origin) != len(copy):
        raise ValueError(f"`target` must have the {len(origin)} bytes of `source`, but has {len(copy)} instead")
    if not len(origin):
        return 0
    if abs(address(origin) - address(copy)) < len(origin):
        raise ValueError("`source` and `target` must not overlap")
    return _hashing().copy(origin, copy)


def hashing_is_native() -> bool:
    """Whether `copy_and_hash` costs no more than a copy on this machine."""
    return isinstance(_hashing(), Native)


class Native:
    """The C code of `native/copy_hash.c`."""

    def __init__(self) -> None:
        library = load("copy_hash")
        if not library.danlu_supported():
            raise NoNativeError("this processor has no crc32 instructions that are known here (SSE 4.2, ARMv8 CRC)")
        library.danlu_init()
        self._copy = _declared(library.danlu_copy_crc32c, ctypes.c_void_p, ctypes.c_void_p)
        self._crc32c = _declared(library.danlu_crc32c, ctypes.c_void_p)

    def crc32c(self, start: int, data: memoryview) -> int:
        """Hash where the data lies."""
        return self._crc32c(start, address(data), len(data)) if len(data) else start

    def copy(self, source: memoryview, target: memoryview) -> int:
        """Copy and hash in one pass."""
        return self._copy(0, address(target), address(source), len(source))


class Portable:
    """google-crc32c, and copies by Python: for processors and machines the C code cannot be made for."""

    def crc32c(self, start: int, data: memoryview) -> int:
        """Hash piece by piece, because the library takes nothing but `bytes`."""
        for begin in range(0, len(data), _PIECE):
            start = google_crc32c.extend(start, bytes(data[begin : begin + _PIECE]))
        return start

    def copy(self, source: memoryview, target: memoryview) -> int:
        """Copy piece by piece and hash each piece while it is in the cache."""
        crc = 0
        for begin in range(0, len(source), _PIECE):
            piece = bytes(source[begin : begin + _PIECE])
            target[begin : begin + _PIECE] = piece
            crc = google_crc32c.extend(crc, piece)
        return crc


@functools.cache
def _hashing() -> _Hashing:
    try:
        return Native()
    except NoNativeError as reason:
        remedy = "install a C compiler (Debian: gcc) if that is what is missing"
        message = f"checksums are not taken while copying: {reason}; staging takes about twice as long; {remedy}"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        return Portable()


def _declared(function: Any, *pointers: type[ctypes.c_void_p]) -> Callable[..., int]:
    function.argtypes = [ctypes.c_uint32, *pointers, ctypes.c_size_t]
    function.restype = ctypes.c_uint32
    return function
