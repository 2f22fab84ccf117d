"""The order of samples as a pure function of seed and index: nothing is stored, nothing is replayed on resume.

Every epoch visits each of `size` samples once, in its own order. The order is a Feistel network, which is a bijection
on a power of four whatever its round function, here keyed by seed and epoch; an output beyond `size` is fed in again
until it falls inside (cycle walking), which keeps it a bijection on [0, size). So a sample costs the same at the start
of the run and after 10^15 samples, and the order takes no memory.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from danlu.storage.store.splitmix64 import GOLDEN, UintArray, splitmix64

IntArray = NDArray[np.int64]

MAX_SAMPLES = 2**62
"""Largest number of samples: two halves of 31 bits."""

# Chosen by a chi-square test over all orders of 3 to 6 samples: 4 rounds fail it, and so do halves of 2 bits.
_ROUNDS = 8
_MIN_HALF_BITS = 3


def shuffled_indices(indices: IntArray, size: int, seed: int) -> IntArray:
    """Sample at each index: in [0, size), and each once in every run of `size` indices that starts at a multiple of it.

    Index i is position i % size of epoch i // size; every epoch and every seed has its own order.
    """
    if not 1 <= size <= MAX_SAMPLES:
        raise ValueError(f"`size` must be from 1 to 2^62, but is {size} instead")
    if not 0 <= seed < 2**64:
        raise ValueError(f"`seed` must be from 0 to 2^64 - 1, but is {seed} instead")
    flat = np.asarray(indices, dtype=np.int64)
    if flat.size and flat.min() < 0:
        raise ValueError(f"`indices` must be 0 or more, but hold {flat.min()}")
    epochs, positions = np.divmod(flat, size)
    return permute_positions(positions, epochs, size, seed)


def permute_positions(positions: IntArray, epochs: IntArray, size: int, seed: int) -> IntArray:
    """The sample at each position, from 0 to size - 1, of the order of its epoch: a bijection for each epoch."""
    key = splitmix64(splitmix64(np.array([seed], dtype=np.uint64)) + epochs.reshape(-1).astype(np.uint64))
    half = max(_MIN_HALF_BITS, ((size - 1).bit_length() + 1) // 2)
    permuted = _feistel(positions.reshape(-1).astype(np.uint64), key, half)
    while (outside := np.flatnonzero(permuted >= size)).size:
        permuted[outside] = _feistel(permuted[outside], key[outside], half)
    return permuted.astype(np.int64).reshape(positions.shape)


def derive_seed(seed: int, *names: int | str) -> int:
    """A separate seed for a part of the order, such as one source of a mixture."""
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _feistel(value: UintArray, key: UintArray, half: int) -> UintArray:
    """A bijection on [0, 4^half) for every key."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> shift, value & mask
    for round_number in range(1, _ROUNDS + 1):
        round_key = key + np.uint64(round_number * GOLDEN % 2**64)
        left, right = right, left ^ (splitmix64(round_key + right) >> np.uint64(64 - half))
    return (left << shift) | right
