"""Mixing of 64-bit words, for the order of samples and for fingerprints."""

import numpy as np
from numpy.typing import NDArray

UintArray = NDArray[np.uint64]
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: the step between two states


def splitmix64(value: UintArray) -> UintArray:
    """One step of splitmix64 (Steele, Lea and Flood, OOPSLA 2014): every input bit reaches every output bit."""
    value = value + np.uint64(GOLDEN)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
