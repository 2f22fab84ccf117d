"""When a pipeline's sends have surely arrived: worked out from the schedule, before it runs.

A rank may forget what it sent once something reaches it that was sent after its own message was used. Waiting for the
send then returns at once and can make no rank wait for another that it did not wait for anyway.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Step(NamedTuple):
    """A pass of one microbatch through one stage: `F`, `B`, or `I` for a backward that leaves the weights for later."""

    kind: str
    stage: int
    microbatch: int


def arrivals(rows: Sequence[Sequence[Step]], rank: int) -> dict[Step, list[Step]]:
    """For the steps of one rank, those of its own steps whose results have arrived when a step's input is there.

    `rows` has the steps of every rank in order. Results that nothing tells of before the end are in no list.
    """
    place = {step: (holder, turn) for holder, row in enumerate(rows) for turn, step in enumerate(row)}
    known = np.zeros((len(rows), len(rows)), dtype=np.int64)
    told: dict[Step, NDArray[np.int64]] = {}
    pending: list[tuple[Step, int, int]] = []
    found: dict[Step, list[Step]] = {}
    turns = [0] * len(rows)
    while any(turn < len(row) for turn, row in zip(turns, rows, strict=True)):
        before = list(turns)
        for holder, row in enumerate(rows):
            while turns[holder] < len(row):
                step = row[turns[holder]]
                source = _source(step, place)
                if source is not None and source not in told:
                    break
                if source is not None:
                    np.maximum(known[holder], told[source], out=known[holder])
                if holder == rank:
                    done = [sent for sent, peer, turn in pending if known[rank][peer] > turn]
                    if done:
                        found[step] = done
                        pending = [each for each in pending if each[0] not in done]
                    user = _user(step, place)
                    if user is not None and place[user][0] != rank:
                        pending.append((step, *place[user]))
                turns[holder] += 1
                known[holder][holder] = turns[holder]
                told[step] = known[holder].copy()
        if turns == before:
            raise ValueError("the schedule cannot be run: every rank waits for another")
    return found


def _source(step: Step, place: Mapping[Step, object]) -> Step | None:
    """The step whose result a step needs from another stage."""
    if step.kind == "F":
        return step._replace(stage=step.stage - 1) if step.stage else None
    return _backward(step.stage + 1, step.microbatch, place) if step.kind in ("B", "I") else None


def _user(step: Step, place: Mapping[Step, object]) -> Step | None:
    """The step of another stage that needs the result of a step."""
    if step.kind == "F":
        following = step._replace(stage=step.stage + 1)
        return following if following in place else None
    return _backward(step.stage - 1, step.microbatch, place) if step.kind in ("B", "I") else None


def _backward(stage: int, microbatch: int, place: Mapping[Step, object]) -> Step | None:
    """The backward of a stage, whole or in halves; none beyond the ends."""
    for kind in ("B", "I"):
        if Step(kind, stage, microbatch) in place:
            return Step(kind, stage, microbatch)
    return None
