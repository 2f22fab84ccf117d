"""Erasure coding: with `m` parity blocks for `k` data blocks, any `m` lost blocks can be reconstructed.

    parity = encode(blocks, 2)                      # two more blocks, each as long as the others
    every = reconstruct({0: a, 2: c, 3: p, 4: q}, k=3, m=2, length=len(a))   # block 1 was lost: every[1]

Blocks are numbered: data from 0, then parity from `k`. One parity block is the xor of all data. More come from a
Reed–Solomon code over GF(2^8): row `i` of parity weights block `j` by `1 / (x_i + y_j)` (a Cauchy matrix, every square
submatrix of which is invertible), scaled so that the first row is all ones. So the first parity block is the xor
whatever `m` is, and adding one later does not change the others. Whether a block is corrupt is found by its checksum,
not here.
"""

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from danlu.native import native_or_portable
from danlu.storage.store.safe_path import Buffer, byte_view

MAX_BLOCKS = 256
"""Data and parity blocks together: the number of elements of the field."""
STRIPE_BYTES = 256 << 10
"""Bytes of each block that are processed at a time: the sum stays in a core's own cache."""

UInt8Array = NDArray[np.uint8]


class TooManyErasuresError(Exception):
    """More blocks are lost than parity can reconstruct."""


def encode(blocks: Sequence[Buffer], m: int) -> list[memoryview]:
    """Return `m` parity blocks for equally long data blocks; then any `m` of all blocks may be lost."""
    k = len(blocks)
    _check_numbers(k, m)
    data = [_array(block) for block in blocks]
    if len({len(block) for block in data}) > 1:
        raise ValueError(f"blocks must be equally long, but have {sorted({len(block) for block in data})} bytes")
    return [block.data for block in _linear_combinations(_parity_rows(k, m), data)]


def reconstruct(known: Mapping[int, Buffer], k: int, m: int, length: int) -> list[memoryview]:
    """Return all `k + m` blocks in order from any `k` of them; `TooManyErasuresError` if there are fewer.

    Given blocks are returned unchanged, without a copy; none is verified against the others.
    """
    _check_numbers(k, m)
    if unknown := sorted(set(known) - set(range(k + m))):
        raise ValueError(f"blocks are numbered 0 to {k + m - 1}, but {unknown[0]} was given")
    present = {number: _array(block) for number, block in sorted(known.items())}
    if wrong := [number for number, block in present.items() if len(block) != length]:
        raise ValueError(f"block {wrong[0]} must have {length} bytes, but has {len(present[wrong[0]])} instead")
    lost = [number for number in range(k + m) if number not in present]
    if len(lost) > m:
        message = (
            f"{len(lost)} of {k + m} blocks are lost ({_listed(lost)}), but {m} parity blocks reconstruct {m} at most"
        )
        raise TooManyErasuresError(f"{message}; restore from an older checkpoint or another copy")
    used = list(present)[:k]
    rows = _solve(_generator(k, m), used, lost)
    found = dict(zip(lost, _linear_combinations(rows, [present[number] for number in used]), strict=True))
    return [found[number].data if number in found else byte_view(known[number]) for number in range(k + m)]


# --- the field: bytes, added by xor, multiplied modulo x^8 + x^4 + x^3 + x^2 + 1


def _logarithms() -> tuple[UInt8Array, NDArray[np.int64]]:
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
def _products(weight: int) -> UInt8Array:
    """The product of every byte with `weight`."""
    table = np.zeros(256, np.uint8)
    if weight:
        table[1:] = _POWER[_LOG[1:] + _LOG[weight]]
    return table


# --- matrices of weights


def _parity_rows(k: int, m: int) -> UInt8Array:
    """Weights [m, k] of the data blocks in each parity block.

    `x_i` counts down from 255 and `y_j` up from 0, so that a row does not depend on how many others there are.
    """
    rows = np.zeros((m, k), np.uint8)
    for column in range(k):
        scale = 255 ^ column  # makes the first row one
        for row in range(m):
            rows[row, column] = _multiply(_inverse((255 - row) ^ column), scale)
    return rows


def _generator(k: int, m: int) -> UInt8Array:
    """Weights [k + m, k] of the data blocks in every block."""
    return np.concatenate([np.eye(k, dtype=np.uint8), _parity_rows(k, m)])


def _solve(generator: UInt8Array, used: Sequence[int], lost: Sequence[int]) -> UInt8Array:
    """Weights [lost, k] of the available blocks in each lost block."""
    k = generator.shape[1]
    # Available = A × data, so data = A⁻¹ × available: both sides are reduced until A is the identity.
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
    for row, number in enumerate(lost):
        for column in range(k):
            rows[row] ^= _products(int(generator[number, column]))[right[column]]
    return rows


# --- sums of blocks


def _linear_combinations(rows: UInt8Array, blocks: Sequence[UInt8Array]) -> list[UInt8Array]:
    """The weighted sums of blocks, one per row; in stripes, so that only the result takes memory."""
    length = len(blocks[0])
    sums = [np.zeros(length, np.uint8) for _ in rows]
    for begin in range(0, length, STRIPE_BYTES):
        for row, total in zip(rows, sums, strict=True):
            for weight, block in zip(row, blocks, strict=True):
                if weight:
                    _add(total[begin : begin + STRIPE_BYTES], block[begin : begin + STRIPE_BYTES], int(weight))
    return sums


def _add(total: UInt8Array, block: UInt8Array, weight: int) -> None:
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
    """The vector code for a product, or None with a warning if it was not compiled."""
    cost = "parity of more than one block is computed by numpy, and takes about ten times as long"
    return native_or_portable("gf256", _multiply_add, lambda: None, cost)


def _multiply_add(library: ctypes.CDLL) -> Any:
    function = library.danlu_multiply_add
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = None
    return function


def _array(block: Buffer) -> UInt8Array:
    return np.frombuffer(byte_view(block), np.uint8)


def _check_numbers(k: int, m: int) -> None:
    if k < 1 or m < 1 or k + m > MAX_BLOCKS:
        raise ValueError(f"`k` and `m` must be 1 or more and {MAX_BLOCKS} together at most, but are {k} and {m}")


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown}, …" if len(numbers) > 8 else shown
