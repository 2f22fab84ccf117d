"""A send is let go only when it has surely arrived, and no later than that is known."""

from typing import Any

import pytest

from danlu.cost.pipeline_schedules import pipeline_actions
from danlu.cost.pipeline_simulator import parse_action
from danlu.parallel.send_completion import MicrobatchPass, completed_sends


def rows(schedule: Any, places: int, microbatches: int, stages: int) -> list[list[MicrobatchPass]]:
    order = pipeline_actions(schedule, pp_ranks=places, microbatches=microbatches, stages_per_rank=stages)
    return [[MicrobatchPass(*parse_action(text)) for text in row] for row in order]


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble", "zbv"])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_result_is_used_before_it_is_let_go(schedule: Any, rank: int) -> None:
    """Every schedule of actions in which a rank runs as late as it may still has the use before the letting go."""
    order = rows(schedule, 4, 12, 2)
    found = completed_sends(order, rank)
    assert found
    for step, sent in found.items():
        needed = needed_before(order, step)
        for each in sent:
            assert order[rank].index(each) < order[rank].index(step)
            user = using(order, each)
            assert user in needed, f"{each} is let go at {step}, though {user} may not have run"


def needed_before(order: list[list[MicrobatchPass]], step: MicrobatchPass) -> set[MicrobatchPass]:
    """All steps that must have run before the input of a step is there."""
    place = {each: (holder, turn) for holder, row in enumerate(order) for turn, each in enumerate(row)}
    seen: set[MicrobatchPass] = set()
    open_steps = [each for each in (source(order, step), before(order, place, step)) if each]
    while open_steps:
        each = open_steps.pop()
        if each not in seen:
            seen.add(each)
            open_steps += [other for other in (source(order, each), before(order, place, each)) if other]
    return seen


def before(
    order: list[list[MicrobatchPass]], place: dict[MicrobatchPass, tuple[int, int]], step: MicrobatchPass
) -> MicrobatchPass | None:
    holder, turn = place[step]
    return order[holder][turn - 1] if turn else None


def source(order: list[list[MicrobatchPass]], step: MicrobatchPass) -> MicrobatchPass | None:
    if step.kind == "F":
        return MicrobatchPass("F", step.stage - 1, step.microbatch) if step.stage else None
    return backward(order, step.stage + 1, step.microbatch) if step.kind in ("B", "I") else None


def using(order: list[list[MicrobatchPass]], step: MicrobatchPass) -> MicrobatchPass | None:
    if step.kind == "F":
        return MicrobatchPass("F", step.stage + 1, step.microbatch)
    return backward(order, step.stage - 1, step.microbatch)


def backward(order: list[list[MicrobatchPass]], stage: int, microbatch: int) -> MicrobatchPass | None:
    every = {each for row in order for each in row}
    return next(
        (s for s in (MicrobatchPass("B", stage, microbatch), MicrobatchPass("I", stage, microbatch)) if s in every),
        None,
    )


def test_few_sends_are_held_in_a_long_step() -> None:
    order = rows("interleaved", 4, 32, 2)
    found = completed_sends(order, 1)
    held: set[MicrobatchPass] = set()
    most = 0
    for step in order[1]:
        held -= set(found.get(step, ()))
        held.add(step)
        most = max(most, len([each for each in held if each.kind == "B"]))
    assert most <= 14, "of 64 backwards"


def test_a_schedule_that_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match="every rank waits"):
        completed_sends(
            [
                [MicrobatchPass("B", 0, 0), MicrobatchPass("F", 0, 0)],
                [MicrobatchPass("F", 1, 0), MicrobatchPass("B", 1, 0)],
            ],
            0,
        )
