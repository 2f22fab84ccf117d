"""Blocks that bring back lost blocks: `m` of parity beside `k` of data survive the loss of any `m` of them.

    parity = encode(blocks, 2)                      # two more blocks, each as long as the others
    whole = repair({0: a, 2: c, 3: p, 4: q}, k=3, m=2, length=len(a))   # block 1 is lost: whole[1] brings it back

Blocks are numbered: data from 0, then parity from `k`. One parity block is the xor of all data. More come from a
Reed–Solomon code over GF(2^8): row `i` of parity weighs block `j` by `1 / (x_i + y_j)` (a Cauchy matrix, every square
part of which has an inverse), scaled so that the first row is all ones. So the first parity block is the xor whatever
`m` is, and adding one later leaves those that are there as they are. A lost block is told from a damaged one by its
checksum, not here.
"""

import ctypes
import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from danlu.storage.native import NoNativeError, load
from danlu.storage.store_path import Buffer, plain

MOST_BLOCKS = 256
"""Data and parity together: the field has no more elements."""
PIECE = 256 << 10
"""Bytes of each block that are worked on at a time: what is being summed stays in a core's own cache."""

Bytes = NDArray[np.uint8]


class TooManyLostError(Exception):
    """More blocks are lost than parity can bring back."""


def encode(blocks: Sequence[Buffer], m: int) -> list[memoryview]:
    """Return `m` parity blocks for equally long data blocks; any `m` of all of them may be lost then."""
    k = len(blocks)
    _check_numbers(k, m)
    data = [_array(block) for block in blocks]
    if len({len(block) for block in data}) > 1:
        raise ValueError(f"blocks must be equally long, but have {sorted({len(block) for block in data})} bytes")
    return [block.data for block in _weighed(_parity_rows(k, m), data)]


def repair(have: Mapping[int, Buffer], k: int, m: int, length: int) -> list[memoryview]:
    """Return all `k + m` blocks in order from any `k` of them; `TooManyLostError` if there are fewer.

    Blocks that are there are returned as they are, without a copy; none is checked against the others.
    """
    _check_numbers(k, m)
    if strange := sorted(set(have) - set(range(k + m))):
        raise ValueError(f"blocks are numbered 0 to {k + m - 1}, but {strange[0]} was given")
    present = {number: _array(block) for number, block in sorted(have.items())}
    if wrong := [number for number, block in present.items() if len(block) != length]:
        raise ValueError(f"block {wrong[0]} must have {length} bytes, but has {len(present[wrong[0]])} instead")
    lost = [number for number in range(k + m) if number not in present]
    if len(lost) > m:
        message = f"{len(lost)} of {k + m} blocks are lost ({_listed(lost)}), but {m} of parity bring back {m} at most"
        raise TooManyLostError(f"{message}; restore from an older checkpoint or another copy")
    used = list(present)[:k]
    rows = _solved(_generator(k, m), used, lost)
    found = dict(zip(lost, _weighed(rows, [present[number] for number in used]), strict=True))
    return [found[number].data if number in found else plain(have[number]) for number in range(k + m)]


# --- the field: bytes, added by xor, multiplied modulo x^8 + x^4 + x^3 + x^2 + 1


def _logarithms() -> tuple[Bytes, NDArray[np.int64]]:
    power, log = np.zeros(510, np.uint8), np.zeros(256, np.int64)
    value = 1
    for exponent in range(255):
        power[exponent] = power[exponent + 255] = value
        log[value] = exponent
        value = value << 1 ^ (0x11D if value & 0x80 else 0)
    return power, log


_POWER, _LOG = _logarithms()


def _multiply(a: int, b: int) -> int:
    return int(_POWER[_LOG[a] + _LOG[b]]) if a and b else 0


def _inverse(a: int) -> int:
    return int(_POWER[255 - _LOG[a]])


@functools.cache
def _products(weight: int) -> Bytes:
    """The product of every byte with `weight`."""
    table = np.zeros(256, np.uint8)
    if weight:
        table[1:] = _POWER[_LOG[1:] + _LOG[weight]]
    return table


# --- matrices of weights


def _parity_rows(k: int, m: int) -> Bytes:
    """Weights [m, k] of the data blocks in each parity block.

    `x_i` counts down from 255 and `y_j` up from 0, so that a row does not depend on how many others there are.
    """
    rows = np.zeros((m, k), np.uint8)
    for column in range(k):
        scale = 255 ^ column  # makes the first row one
        for row in range(m):
            rows[row, column] = _multiply(_inverse((255 - row) ^ column), scale)
    return rows


def _generator(k: int, m: int) -> Bytes:
    """Weights [k + m, k] of the data blocks in every block."""
    return np.concatenate([np.eye(k, dtype=np.uint8), _parity_rows(k, m)])


def _solved(generator: Bytes, used: Sequence[int], lost: Sequence[int]) -> Bytes:
    """Weights [lost, k] of the blocks at hand in each lost block."""
    k = generator.shape[1]
    # Blocks at hand = A × data, so data = A⁻¹ × blocks at hand: both sides are reduced until A is the identity.
    left, right = generator[list(used)].copy(), np.eye(k, dtype=np.uint8)
    for column in range(k):
        pivot = next(row for row in range(column, k) if left[row, column])
        scale = _products(_inverse(int(left[pivot, column])))
        for side in (left, right):
            side[[column, pivot]] = side[[pivot, column]]
            side[column] = scale[side[column]]
        for row in range(k):
            if row != column and left[row, column]:
                factor = _products(int(left[row, column]))
                left[row] ^= factor[left[column]]
                right[row] ^= factor[right[column]]
    rows = np.zeros((len(lost), k), np.uint8)
    for place, number in enumerate(lost):
        for column in range(k):
            rows[place] ^= _products(int(generator[number, column]))[right[column]]
    return rows


# --- the work


def _weighed(rows: Bytes, blocks: Sequence[Bytes]) -> list[Bytes]:
    """The weighed sums of blocks, one a row; piece by piece, so that nothing but the result takes memory."""
    length = len(blocks[0])
    sums = [np.zeros(length, np.uint8) for _ in rows]
    for begin in range(0, length, PIECE):
        for row, total in zip(rows, sums, strict=True):
            for weight, block in zip(row, blocks, strict=True):
                if weight:
                    _add(total[begin : begin + PIECE], block[begin : begin + PIECE], int(weight))
    return sums


def _add(total: Bytes, block: Bytes, weight: int) -> None:
    if weight == 1:
        np.bitwise_xor(total, block, out=total)
        return
    table = _products(weight)
    if (kernel := _kernel()) is None:
        np.bitwise_xor(total, table[block], out=total)
    else:
        halves = np.concatenate([table[:16], table[:256:16]])
        kernel(total.ctypes.data, block.ctypes.data, halves.ctypes.data, len(total))


@functools.cache
def _kernel() -> Any:
    """The vector code for a product, or None with a warning where it cannot be made."""
    try:
        function = load("gf256").danlu_multiply_add
    except NoNativeError as reason:
        message = f"parity of more than one block is computed by numpy: {reason}; it takes about ten times as long"
        warnings.warn(f"{message}; install a C compiler (Debian: gcc)", RuntimeWarning, stacklevel=3)
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = None
    return function


def _array(block: Buffer) -> Bytes:
    return np.frombuffer(plain(block), np.uint8)


def _check_numbers(k: int, m: int) -> None:
    if k < 1 or m < 1 or k + m > MOST_BLOCKS:
        raise ValueError(f"`k` and `m` must be 1 or more and {MOST_BLOCKS} together at most, but are {k} and {m}")


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown}, …" if len(numbers) > 8 else shown
