"""Whether a resumed run continues with the very next sample: computed from its events, not assumed."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import numpy as np

from danlu.spec.event import Event, SpikeEvent, StartEvent, StepEvent
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
    tokens, passed_over = _tokens_by_step(history)
    if any(number not in tokens for number in range(1, step + 1)):
        return None
    consumed = sum(tokens[number] for number in range(1, step + 1)) // length
    consumed += sum(samples for rewound_to, samples in passed_over if rewound_to < step)
    return SampleContinuity(
        repeated=max(0, consumed - cursor) + _repeated_near_cursor(cursor, which), skipped=max(0, cursor - consumed)
    )


def _tokens_by_step(history: Iterable[Event]) -> tuple[dict[int, int], list[tuple[int, int]]]:
    """Tokens of every step that counts, and of every rewind its step and the samples that were passed over.

    Steps that a restart or a rewind repeats are dropped; what a rewind passed over comes after the step it went to.
    """
    tokens: dict[int, int] = {}
    passed_over: list[tuple[int, int]] = []
    for event in history:
        if isinstance(event, StartEvent):
            tokens = {step: count for step, count in tokens.items() if step <= event.step}
            passed_over = [rewind for rewind in passed_over if rewind[0] < event.step]
        elif isinstance(event, StepEvent):
            tokens[event.step] = event.tokens
        elif isinstance(event, SpikeEvent) and event.rewound_to is not None:
            tokens = {step: count for step, count in tokens.items() if step <= event.rewound_to}
            passed_over = [rewind for rewind in passed_over if rewind[0] < event.rewound_to]
            passed_over.append((event.rewound_to, event.lost_samples))
    return tokens, passed_over


def _repeated_near_cursor(cursor: int, which: Callable[[IntArray], Iterable[Hashable]]) -> int:
    """Samples just after the cursor that are also just before it, in the same epoch: 0 if the order is the same."""
    before = np.arange(max(0, cursor - WINDOW), cursor, dtype=np.int64)
    after = np.arange(cursor, cursor + WINDOW, dtype=np.int64)
    return len(set(which(before)) & set(which(after)))
