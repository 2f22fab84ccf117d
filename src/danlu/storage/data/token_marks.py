"""What is known about a token besides its id: whether it ends its document, and whether the loss counts it.

In memory, and on disk where a data set has a loss mask, both are the two lowest bits of one word with the id: what
checks and caches tokens does the same for their marks.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from danlu.storage.data.shuffle import IntArray

MARK_BITS = 2
"""Bits of a word below the token id."""
_COUNTED, _END = 1, 2


class MarkedTokens(NamedTuple):
    """Tokens with their marks; three arrays of one shape."""

    tokens: IntArray
    ends: NDArray[np.bool_]
    """Whether a token is the last of its document."""
    counted: NDArray[np.bool_]
    """Whether the loss counts the prediction of the token."""


def pack_marks(tokens: IntArray, ends: NDArray[np.bool_], counted: NDArray[np.bool_] | bool = True) -> IntArray:
    """Ids and marks as one int64 word per token."""
    words: IntArray = tokens.astype(np.int64) << MARK_BITS | ends * np.int64(_END) | counted * np.int64(_COUNTED)
    return words


def unpack_marks(words: IntArray) -> MarkedTokens:
    """The ids and marks in words."""
    return MarkedTokens(words >> MARK_BITS, (words & _END) != 0, (words & _COUNTED) != 0)
