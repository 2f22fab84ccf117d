"""A hash of a tensor's content that does not depend on how it is sharded; and whether its elements are finite.

Every element, as the unsigned integer of its bits, is multiplied by one odd weight for each of its global coordinates,
and the products are added modulo 2^64. So the sums of any boxes that tile a tensor add up to the same number, and a
single different element changes it. It shows that two layouts hold the same bits; crc32c is for detecting corruption.
"""

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from danlu.native import NativeUnavailableError, native_or_portable
from danlu.storage.checkpoint.boxes import Dims
from danlu.storage.checkpoint.manifest import SafetensorsDtype
from danlu.storage.store.splitmix64 import splitmix64

_LOW_BITS = 16
_PERIOD = 1 << _LOW_BITS
"""Coordinates that share the weight of their high bits: the table of low weights stays in a core's own cache."""
_BLOCK_ELEMENTS = 1 << 16
_UINT_OF_SIZE = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_EXPONENT_MASK: dict[SafetensorsDtype, int] = {
    "F64": 0x7FF << 52,
    "F32": 0xFF << 23,
    "F16": 0x1F << 10,
    "BF16": 0xFF << 7,
    "F8_E5M2": 0x1F << 2,
    "F8_E4M3": 0x7F,
}
"""Bits that are all set in NaN, and in infinity where the dtype has one."""
UIntArray = NDArray[np.unsignedinteger]
UInt64Array = NDArray[np.uint64]


class _FingerprintBackend(Protocol):
    """Two implementations: in C, or with numpy."""

    def add_row_sums(self, rows: UIntArray, weights: UInt64Array, scale: int, sums: UInt64Array) -> None: ...

    def any_has_bits(self, bits: UIntArray, mask: int) -> bool: ...


def fingerprint(bits: UIntArray, offset: Dims) -> int:
    """Weighted sum of a contiguous box of elements, given as unsigned integers, at `offset` in its tensor."""
    if bits.size == 0:
        return 0
    values: UIntArray = bits.reshape(-1)
    for dim in range(bits.ndim - 1, -1, -1):
        values = _weighted_row_sums(values.reshape(-1, bits.shape[dim]), dim, offset[dim])
    return int(values[0])


def all_finite(bits: UIntArray, dtype: SafetensorsDtype) -> bool:
    """Whether no element is infinite or NaN."""
    mask = _EXPONENT_MASK.get(dtype)
    return mask is None or not _fingerprint_backend().any_has_bits(bits, mask)


def as_bits(raw: memoryview, itemsize: int, size: Dims) -> UIntArray:
    """Bytes of a box as the unsigned integers of its elements, without a copy."""
    return np.frombuffer(raw, dtype=np.dtype(_UINT_OF_SIZE[itemsize]).newbyteorder("<")).reshape(size)


def _weighted_row_sums(rows: UIntArray, dim: int, start: int) -> UInt64Array:
    """Sum of each row: its elements times the weights of their coordinates from `start` on.

    A weight is an odd number for the low sixteen bits of a coordinate times one for the rest.
    """
    count, width = rows.shape
    sums = np.zeros(count, dtype=np.uint64)
    first, weights = start // _PERIOD, _low_weights(dim)
    scales = _odd_weights(
        np.arange(first, (start + width - 1) // _PERIOD + 1, dtype=np.uint64), (dim << 48) + (1 << 47)
    )
    for period, scale in enumerate(scales.tolist(), first):
        begin, end = max(start, period * _PERIOD), min(start + width, (period + 1) * _PERIOD)
        low = begin - period * _PERIOD
        _fingerprint_backend().add_row_sums(
            rows[:, begin - start : end - start], weights[low : low + end - begin], scale, sums
        )
    return sums


@functools.lru_cache(maxsize=16)
def _low_weights(dim: int) -> UInt64Array:
    return _odd_weights(np.arange(_PERIOD, dtype=np.uint64), dim << 48)


def _odd_weights(numbers: UInt64Array, start: int) -> UInt64Array:
    """An odd number for each number, from a different sequence for every start."""
    return splitmix64(numbers + np.uint64(start)) | np.uint64(1)


class NativeFingerprint:
    """The C code of `native/fingerprint.c`; other threads run meanwhile."""

    def __init__(self, library: ctypes.CDLL) -> None:
        if sys.byteorder != "little":
            raise NativeUnavailableError("this processor is big-endian")
        self._add_row_sums: dict[int, Callable[..., None]] = {}
        self._any_with: dict[int, Callable[..., int]] = {}
        pointer, number, word = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
        for itemsize in _UINT_OF_SIZE:
            add = getattr(library, f"danlu_add_row_sums_{8 * itemsize}")
            add.argtypes, add.restype = [pointer, number, number, number, pointer, word, pointer], None
            self._add_row_sums[itemsize] = add
            any_with = getattr(library, f"danlu_any_with_{8 * itemsize}")
            any_with.argtypes, any_with.restype = [pointer, number, word], ctypes.c_int
            self._any_with[itemsize] = any_with

    def add_row_sums(self, rows: UIntArray, weights: UInt64Array, scale: int, sums: UInt64Array) -> None:
        """Add every row's weighted sum, scaled, to its entry in `sums`."""
        count, width = rows.shape
        stride = rows.strides[0] // rows.itemsize
        self._add_row_sums[rows.itemsize](
            rows.ctypes.data, stride, count, width, weights.ctypes.data, scale, sums.ctypes.data
        )

    def any_has_bits(self, bits: UIntArray, mask: int) -> bool:
        """Whether any element has all bits of the mask."""
        return bool(self._any_with[bits.itemsize](bits.ctypes.data, bits.size, mask))


class NumpyFingerprint:
    """Numpy: for machines where the C code was not compiled. Works in blocks that stay in the cache."""

    def add_row_sums(self, rows: UIntArray, weights: UInt64Array, scale: int, sums: UInt64Array) -> None:
        """Add every row's weighted sum, scaled, to its entry in `sums`."""
        count, width = rows.shape
        step = max(1, _BLOCK_ELEMENTS // width)
        products = np.empty((min(step, count), width), dtype=np.uint64)
        for start in range(0, count, step):
            block = rows[start : start + step]
            into = products[: len(block)]
            np.multiply(block, weights, out=into)
            sums[start : start + step] += into.sum(axis=1, dtype=np.uint64) * np.uint64(scale)

    def any_has_bits(self, bits: UIntArray, mask: int) -> bool:
        """Whether any element has all bits of the mask."""
        flat, all_of = bits.reshape(-1), bits.dtype.type(mask)
        blocks = (flat[start : start + _BLOCK_ELEMENTS] for start in range(0, flat.size, _BLOCK_ELEMENTS))
        return any(bool(((block & all_of) == all_of).any()) for block in blocks)


@functools.cache
def _fingerprint_backend() -> _FingerprintBackend:
    cost = "fingerprints are computed with numpy, which takes about seven times as long"
    return native_or_portable("fingerprint", NativeFingerprint, NumpyFingerprint, cost)
