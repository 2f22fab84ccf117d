"""What multi-token prediction reads and predicts, from full sequences: shards of them have other neighbors."""

import numpy as np
from numpy.typing import NDArray

from danlu.parallel.batch import IGNORE_INDEX
from danlu.storage.data.shuffle import IntArray


def shift_ahead(
    tokens: IntArray,
    depth: int,
    counted: NDArray[np.bool_] | None = None,
    ends: NDArray[np.bool_] | None = None,
) -> tuple[IntArray, IntArray]:
    """Inputs and targets of `depth` modules, each `[rows, depth, length]`, from rows of `length + 1` tokens.

    Module k, from 0, reads the token k + 1 places ahead and predicts the one after it. A target is ignored where the
    row has none, where it is not `counted`, and where a document `ends` between the position and the target: what
    counts is of one document from the position to the target.
    """
    rows, length = tokens.shape[0], tokens.shape[1] - 1
    inputs = np.zeros((rows, depth, length), dtype=tokens.dtype)
    targets = np.full((rows, depth, length), IGNORE_INDEX, dtype=tokens.dtype)
    crossed = np.zeros((rows, length), dtype=bool) if ends is None else ends[:, :-1].copy()
    for module in range(min(depth, length)):
        inputs[:, module, : length - module] = tokens[:, 1 + module :]
        known = length - 1 - module  # positions with a target this far ahead
        if ends is not None:
            crossed[:, :known] |= ends[:, 1 + module : 1 + module + known]
        excluded = crossed[:, :known]
        if counted is not None:
            excluded = excluded | ~counted[:, 2 + module :]
        targets[:, module, :known] = np.where(excluded, IGNORE_INDEX, tokens[:, 2 + module :])
    return inputs, targets
