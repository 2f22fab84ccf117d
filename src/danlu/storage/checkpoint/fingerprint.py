"""One number for a tensor's content that does not depend on how it is cut; and whether its numbers are finite.

Every element, as the unsigned integer of its bits, is multiplied by one odd weight for each of its global coordinates,
and the products are added modulo 2^64. So the sums of any boxes that tile a tensor add up to the same number, and a
single element that differs changes it. It tells that two layouts hold the same bits; damage is what crc32c is for.
"""

import ctypes
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from danlu.storage.checkpoint.boxes import Extent
from danlu.storage.checkpoint.manifest import Dtype
from danlu.storage.native import NoNativeError, load
from danlu.storage.order import mixed

_LOW = 16
_PERIOD = 1 << _LOW
"""Coordinates that share the weight of their high bits: the table of low weights stays in a core's own cache."""
_PIECE = 1 << 16
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_NOT_FINITE: dict[Dtype, int] = {
    "F64": 0x7FF << 52,
    "F32": 0xFF << 23,
    "F16": 0x1F << 10,
    "BF16": 0xFF << 7,
    "F8_E5M2": 0x1F << 2,
    "F8_E4M3": 0x7F,
}
"""Bits that are all set in what is not a number, and in an infinity where there is one."""
Bits = NDArray[np.unsignedinteger]
Words = NDArray[np.uint64]


class _Weighing(Protocol):
    """Two ways to do the same: in C, or with numpy."""

    def add_row_sums(self, rows: Bits, weights: Words, scale: int, sums: Words) -> None: ...

    def any_with(self, bits: Bits, mask: int) -> bool: ...


def fingerprint(bits: Bits, offset: Extent) -> int:
    """Weighted sum of a contiguous box of elements, given as unsigned integers, that lies at `offset` in its tensor."""
    if bits.size == 0:
        return 0
    values: Bits = bits.reshape(-1)
    for dim in range(bits.ndim - 1, -1, -1):
        values = _weighted(values.reshape(-1, bits.shape[dim]), dim, offset[dim])
    return int(values[0])


def all_finite(bits: Bits, dtype: Dtype) -> bool:
    """Whether no element is infinite or not a number."""
    mask = _NOT_FINITE.get(dtype)
    return mask is None or not _weighing().any_with(bits, mask)


def as_bits(raw: memoryview, itemsize: int, size: Extent) -> Bits:
    """Bytes of a box as the unsigned integers of its elements, without a copy."""
    return np.frombuffer(raw, dtype=np.dtype(_UNSIGNED[itemsize]).newbyteorder("<")).reshape(size)


def _weighted(rows: Bits, dim: int, start: int) -> Words:
    """Sum of each row, its elements times the weights of their coordinates from `start` on.

    A weight is an odd number for the low sixteen bits of a coordinate times one for the rest.
    """
    count, width = rows.shape
    sums = np.zeros(count, dtype=np.uint64)
    first, weights = start // _PERIOD, _low_weights(dim)
    scales = _odd(np.arange(first, (start + width - 1) // _PERIOD + 1, dtype=np.uint64), (dim << 48) + (1 << 47))
    for period, scale in enumerate(scales.tolist(), first):
        begin, end = max(start, period * _PERIOD), min(start + width, (period + 1) * _PERIOD)
        low = begin - period * _PERIOD
        _weighing().add_row_sums(rows[:, begin - start : end - start], weights[low : low + end - begin], scale, sums)
    return sums


@functools.lru_cache(maxsize=16)
def _low_weights(dim: int) -> Words:
    return _odd(np.arange(_PERIOD, dtype=np.uint64), dim << 48)


def _odd(numbers: Words, start: int) -> Words:
    """An odd number for each number, from a sequence that is another for every start."""
    return mixed(numbers + np.uint64(start)) | np.uint64(1)


class Native:
    """The C code of `native/fingerprint.c`; other threads run meanwhile."""

    def __init__(self) -> None:
        if sys.byteorder != "little":
            raise NoNativeError("this processor has the high byte first")
        library = load("fingerprint")
        self._add_row_sums: dict[int, Callable[..., None]] = {}
        self._any_with: dict[int, Callable[..., int]] = {}
        pointer, number, word = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
        for itemsize in _UNSIGNED:
            add = getattr(library, f"danlu_add_row_sums_{8 * itemsize}")
            add.argtypes, add.restype = [pointer, number, number, number, pointer, word, pointer], None
            self._add_row_sums[itemsize] = add
            look = getattr(library, f"danlu_any_with_{8 * itemsize}")
            look.argtypes, look.restype = [pointer, number, word], ctypes.c_int
            self._any_with[itemsize] = look

    def add_row_sums(self, rows: Bits, weights: Words, scale: int, sums: Words) -> None:
        """Add every row's weighted sum, scaled, to its place in `sums`."""
        count, width = rows.shape
        stride = rows.strides[0] // rows.itemsize
        self._add_row_sums[rows.itemsize](
            rows.ctypes.data, stride, count, width, weights.ctypes.data, scale, sums.ctypes.data
        )

    def any_with(self, bits: Bits, mask: int) -> bool:
        """Whether any element has all bits of the mask."""
        return bool(self._any_with[bits.itemsize](bits.ctypes.data, bits.size, mask))


class Portable:
    """Numpy: for machines the C code cannot be made for. Works in pieces that stay in the cache."""

    def add_row_sums(self, rows: Bits, weights: Words, scale: int, sums: Words) -> None:
        """Add every row's weighted sum, scaled, to its place in `sums`."""
        count, width = rows.shape
        step = max(1, _PIECE // width)
        products = np.empty((min(step, count), width), dtype=np.uint64)
        for start in range(0, count, step):
            piece = rows[start : start + step]
            into = products[: len(piece)]
            np.multiply(piece, weights, out=into)
            sums[start : start + step] += into.sum(axis=1, dtype=np.uint64) * np.uint64(scale)

    def any_with(self, bits: Bits, mask: int) -> bool:
        """Whether any element has all bits of the mask."""
        flat, all_of = bits.reshape(-1), bits.dtype.type(mask)
        pieces = (flat[start : start + _PIECE] for start in range(0, flat.size, _PIECE))
        return any(bool(((piece & all_of) == all_of).any()) for piece in pieces)


@functools.cache
def _weighing() -> _Weighing:
    try:
        return Native()
    except NoNativeError as reason:
        remedy = "install a C compiler (Debian: gcc) if that is what is missing"
        message = f"fingerprints are taken with numpy: {reason}; about ten times slower than a disk reads; {remedy}"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        return Portable()
