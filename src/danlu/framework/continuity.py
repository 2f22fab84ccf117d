"""Whether a resumed run goes on with the very next sample: reckoned from its history, not taken for granted."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

import numpy as np

from danlu.spec.event import Event, Started, StepReport
from danlu.storage.order import Ints

WINDOW = 1 << 12
"""Samples on either side of the cursor whose order is looked at."""


@dataclass(frozen=True)
class Continuity:
    """How the samples before a checkpoint and those after it fit together."""

    repeated: int
    """Consumed by steps that are kept, and read again."""
    skipped: int
    """Never read."""


def continuity(
    history: Iterable[Event], step: int, cursor: int, length: int, which: Callable[[Ints], Iterable[Hashable]]
) -> Continuity | None:
    """Hold a checkpoint's cursor against what the steps up to it consumed; None if the history has not all of them.

    `length` is that of a sample now; `which` says which samples of which epochs stand at indices of the order.
    """
    tokens = _tokens_by_step(history)
    if any(number not in tokens for number in range(1, step + 1)):
        return None
    consumed = sum(tokens[number] for number in range(1, step + 1)) // length
    return Continuity(repeated=max(0, consumed - cursor) + _met_again(cursor, which), skipped=max(0, cursor - consumed))


def _tokens_by_step(history: Iterable[Event]) -> dict[int, int]:
    """Tokens of every step that counts: what a restart takes again was never part of what goes on."""
    tokens: dict[int, int] = {}
    for event in history:
        if isinstance(event, Started):
            tokens = {step: count for step, count in tokens.items() if step <= event.step}
        elif isinstance(event, StepReport):
            tokens[event.step] = event.tokens
    return tokens


def _met_again(cursor: int, which: Callable[[Ints], Iterable[Hashable]]) -> int:
    """Samples just after the cursor that stand just before it too, in the same epoch: 0 if the order is one."""
    before = np.arange(max(0, cursor - WINDOW), cursor, dtype=np.int64)
    after = np.arange(cursor, cursor + WINDOW, dtype=np.int64)
    return len(set(which(before)) & set(which(after)))
