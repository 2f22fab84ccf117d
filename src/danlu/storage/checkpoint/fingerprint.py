"""One number for a tensor's content that does not depend on how it is cut.

Every element, as the unsigned integer of its bits, is multiplied by one odd weight for each of its global coordinates,
and the products are added modulo 2^64. So the sums of any boxes that tile a tensor add up to the same number, and a
single element that differs changes it. It tells that two layouts hold the same bits; damage is what crc32c is for.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from danlu.storage.checkpoint.boxes import Extent
from danlu.storage.order import mixed

_BLOCK = 1 << 16
_LOW = 16
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
Words = NDArray[np.uint64]


def fingerprint(bits: NDArray[np.unsignedinteger], offset: Extent) -> int:
    """Weighted sum of a contiguous box of elements, given as unsigned integers, that lies at `offset` in its tensor."""
    if bits.size == 0:
        return 0
    dims = bits.ndim
    if dims == 0:
        return int(bits)
    flat = bits.reshape(-1, bits.shape[-1])
    columns = _weights(dims - 1, offset[-1], bits.shape[-1])
    sums = _row_sums(flat, columns)
    for dim in range(dims - 2, -1, -1):
        rows = sums.reshape(-1, bits.shape[dim])
        sums = (rows * _weights(dim, offset[dim], bits.shape[dim])).sum(axis=1, dtype=np.uint64)
    return int(sums[0])


def as_bits(raw: memoryview, itemsize: int, size: Extent) -> NDArray[np.unsignedinteger]:
    """Bytes of a box as the unsigned integers of its elements, without a copy."""
    return np.frombuffer(raw, dtype=np.dtype(_UNSIGNED[itemsize]).newbyteorder("<")).reshape(size)


def _row_sums(rows: NDArray[np.unsignedinteger], weights: Words) -> Words:
    """Sum of each row times the weights; in blocks that stay in the cache."""
    count, width = rows.shape
    sums = np.zeros(count, dtype=np.uint64)
    if width >= _BLOCK:
        for row in range(count):
            for start in range(0, width, _BLOCK):
                piece = rows[row : row + 1, start : start + _BLOCK]
                products = np.multiply(piece, weights[start : start + _BLOCK], dtype=np.uint64)
                sums[row : row + 1] += products.sum(axis=1, dtype=np.uint64)  # arrays wrap around, scalars warn
        return sums
    step = max(1, _BLOCK // width)
    products = np.empty((min(step, count), width), dtype=np.uint64)
    for start in range(0, count, step):
        piece = rows[start : start + step]
        into = products[: len(piece)]
        np.multiply(piece, weights, out=into)
        np.sum(into, axis=1, out=sums[start : start + len(piece)])
    return sums


@lru_cache(maxsize=64)
def _weights(dim: int, start: int, count: int) -> Words:
    """Weights of `count` coordinates: an odd number for the low sixteen bits times one for the rest."""
    index = np.arange(start, start + count, dtype=np.uint64)
    weights = _low_weights(dim)[index & np.uint64((1 << _LOW) - 1)]
    high = index >> np.uint64(_LOW)
    return weights * (mixed(high + np.uint64((dim << 48) + (1 << 47))) | np.uint64(1))


@lru_cache(maxsize=16)
def _low_weights(dim: int) -> Words:
    return mixed(np.arange(1 << _LOW, dtype=np.uint64) + np.uint64(dim << 48)) | np.uint64(1)
