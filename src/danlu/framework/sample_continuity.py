"""Whether a resumed run continues with the very next sample: computed from its events, not assumed."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import numpy as np

from danlu.spec.event import Event, StartEvent, StepEvent
from danlu.storage.data.shuffle import IntArray

WINDOW = 1 << 12
"""Samples on either side of the cursor whose order is checked."""


@dataclass(frozen=True)
class SampleContinuity:
    """How the samples before a checkpoint and those after it fit together."""

    repeated: int
    """Consumed by steps up to the checkpoint, and read again."""
    skipped: int
    """Never read."""


def check_sample_continuity(
    history: Iterable[Event], step: int, cursor: int, length: int, which: Callable[[IntArray], Iterable[Hashable]]
) -> SampleContinuity | None:
    """Compare a checkpoint's cursor with what the steps up to it consumed; None if the history lacks some of them.

    `length` is that of a sample now; `which` returns the samples and epochs at indices of the order.
    """
    tokens = _tokens_by_step(history)
    if any(number not in tokens for number in range(1, step + 1)):
        return None
    consumed = sum(tokens[number] for number in range(1, step + 1)) // length
    return SampleContinuity(
        repeated=max(0, consumed - cursor) + _repeated_near_cursor(cursor, which), skipped=max(0, cursor - consumed)
    )


def _tokens_by_step(history: Iterable[Event]) -> dict[int, int]:
    """Tokens of every step that counts: steps that a restart repeats are dropped."""
    tokens: dict[int, int] = {}
    for event in history:
        if isinstance(event, StartEvent):
            tokens = {step: count for step, count in tokens.items() if step <= event.step}
        elif isinstance(event, StepEvent):
            tokens[event.step] = event.tokens
    return tokens


def _repeated_near_cursor(cursor: int, which: Callable[[IntArray], Iterable[Hashable]]) -> int:
    """Samples just after the cursor that are also just before it, in the same epoch: 0 if the order is the same."""
    before = np.arange(max(0, cursor - WINDOW), cursor, dtype=np.int64)
    after = np.arange(cursor, cursor + WINDOW, dtype=np.int64)
    return len(set(which(before)) & set(which(after)))
