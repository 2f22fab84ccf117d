"""When a pipeline's sends are known to be received: computed from the schedule, before it runs.

A rank may free what it sent once it receives something that was sent after its own message was used. Waiting for the
send then returns at once and makes no rank wait for another that it did not wait for anyway.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class MicrobatchPass(NamedTuple):
    """A pass of one microbatch through one stage: `F`, `B`, or `I` for a backward that leaves the weights for later."""

    kind: str
    stage: int
    microbatch: int


def completed_sends(rows: Sequence[Sequence[MicrobatchPass]], rank: int) -> dict[MicrobatchPass, list[MicrobatchPass]]:
    """For each pass of a rank, those of its earlier passes whose results are received when the pass has its input.

    `rows` has the passes of every rank in order. Results not known to be received before the end are in no list.
    """
    position = {step: (holder, turn) for holder, row in enumerate(rows) for turn, step in enumerate(row)}
    known = np.zeros((len(rows), len(rows)), dtype=np.int64)
    known_after: dict[MicrobatchPass, NDArray[np.int64]] = {}
    pending: list[tuple[MicrobatchPass, int, int]] = []
    completed: dict[MicrobatchPass, list[MicrobatchPass]] = {}
    turns = [0] * len(rows)
    while any(turn < len(row) for turn, row in zip(turns, rows, strict=True)):
        before = list(turns)
        for holder, row in enumerate(rows):
            while turns[holder] < len(row):
                step = row[turns[holder]]
                source = _source(step, position)
                if source is not None and source not in known_after:
                    break
                if source is not None:
                    np.maximum(known[holder], known_after[source], out=known[holder])
                if holder == rank:
                    done = [sent for sent, peer, turn in pending if known[rank][peer] > turn]
                    if done:
                        completed[step] = done
                        pending = [each for each in pending if each[0] not in done]
                    user = _consumer(step, position)
                    if user is not None and position[user][0] != rank:
                        pending.append((step, *position[user]))
                turns[holder] += 1
                known[holder][holder] = turns[holder]
                known_after[step] = known[holder].copy()
        if turns == before:
            raise ValueError("the schedule cannot be run: every rank waits for another")
    return completed


def _source(step: MicrobatchPass, position: Mapping[MicrobatchPass, object]) -> MicrobatchPass | None:
    """The pass of another stage whose result a pass needs."""
    if step.kind == "F":
        return step._replace(stage=step.stage - 1) if step.stage else None
    return _backward(step.stage + 1, step.microbatch, position) if step.kind in ("B", "I") else None


def _consumer(step: MicrobatchPass, position: Mapping[MicrobatchPass, object]) -> MicrobatchPass | None:
    """The pass of another stage that needs the result of a pass."""
    if step.kind == "F":
        following = step._replace(stage=step.stage + 1)
        return following if following in position else None
    return _backward(step.stage - 1, step.microbatch, position) if step.kind in ("B", "I") else None


def _backward(stage: int, microbatch: int, position: Mapping[MicrobatchPass, object]) -> MicrobatchPass | None:
    """The backward of a stage, full or its first half; None beyond the ends."""
    for kind in ("B", "I"):
        if MicrobatchPass(kind, stage, microbatch) in position:
            return MicrobatchPass(kind, stage, microbatch)
    return None
