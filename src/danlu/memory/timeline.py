"""From every entry in the book of live bytes to the few instants that tell the story of a step."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from danlu.spec.trace import Instant, Phase

INSTANTS = 300
"""Instants a step is told in: more than a page has room for, few enough for a file."""

Context = tuple[Phase, str, int | None]
"""Phase, module and microbatch that an entry was written in."""


def instants(
    changes: NDArray[np.int64], at: NDArray[np.int64], context: Callable[[int], Context]
) -> tuple[tuple[Instant, ...], Instant]:
    """The highest moment of every stretch of the step, in order, and the highest of all.

    `changes` has a row for every entry: the bytes that come or go, by kind. `context` tells what ran at a row.
    """
    held = changes.cumsum(axis=0)
    totals = held.sum(axis=1)
    stretches = at * INSTANTS // (int(at.max()) + 1)
    starts = np.flatnonzero(np.diff(stretches, prepend=-1))
    ends = [*starts[1:].tolist(), len(totals)]
    chosen = [start + int(totals[start:end].argmax()) for start, end in zip(starts.tolist(), ends, strict=True)]

    def instant(row: int) -> Instant:
        phase, module, microbatch = context(row)
        return Instant(
            at=int(at[row]),
            phase=phase,
            module=module,
            microbatch=microbatch,
            held=tuple(int(size) for size in held[row]),
        )

    return tuple(instant(row) for row in chosen), instant(int(totals.argmax()))
