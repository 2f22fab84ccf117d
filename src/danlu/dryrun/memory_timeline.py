"""Memory peaks of about 300 equal slices of a step, from all changes of live bytes."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from danlu.spec.trace import MemorySample, Phase

MAX_INSTANTS = 300
"""Slices of a step: more than a page has room for, few enough for a file."""

StepContext = tuple[Phase, str, int | None]
"""Phase, module and microbatch of a change."""


def sample_instants(
    changes: NDArray[np.int64], at: NDArray[np.int64], context: Callable[[int], StepContext]
) -> tuple[tuple[MemorySample, ...], MemorySample]:
    """The memory peak of every slice of the step, in order, and the peak of the step.

    `changes` has a row for every change: bytes allocated or freed, by kind. `context` returns what ran at a row.
    """
    held = changes.cumsum(axis=0)
    totals = held.sum(axis=1)
    slices = at * MAX_INSTANTS // (int(at.max()) + 1)
    starts = np.flatnonzero(np.diff(slices, prepend=-1))
    ends = [*starts[1:].tolist(), len(totals)]
    chosen = [start + int(totals[start:end].argmax()) for start, end in zip(starts.tolist(), ends, strict=True)]

    def instant(row: int) -> MemorySample:
        phase, module, microbatch = context(row)
        return MemorySample(
            at=int(at[row]),
            phase=phase,
            module=module,
            microbatch=microbatch,
            held=tuple(int(size) for size in held[row]),
        )

    return tuple(instant(row) for row in chosen), instant(int(totals.argmax()))
