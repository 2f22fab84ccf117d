"""The order of a pipeline's actions on every place, for the schedules that a formula gives.

They are the orders that torch.distributed.pipelining runs, which a test holds them against.
"""

from collections.abc import Sequence
from itertools import chain

from danlu.cost.pipeline import Action, ScheduleError
from danlu.spec.plan import LOOPED_SCHEDULES, Schedule

Work = Sequence[tuple[int, int]]
"""Stages and microbatches, in the order they are taken."""


def actions_of(
    schedule: Schedule, *, places: int, microbatches: int, stages_per_place: int = 1
) -> tuple[tuple[str, ...], ...]:
    """For every place of the pipeline its actions in order, as `simulate` reads them.

    `gpipe` takes all forwards, then all backwards; `1f1b` begins its backwards as soon as one arrives; `interleaved`
    does so with several stages a place. Raises `ScheduleError` for the zero-bubble schedules, whose order a dry run
    tells, and where the numbers do not fit the schedule.
    """
    if schedule == "interleaved":
        rows = _interleaved(places, microbatches, stages_per_place)
    elif schedule in LOOPED_SCHEDULES:
        raise ScheduleError(
            f'no formula gives the order of "{schedule}": take it from a dry run, or use gpipe, 1f1b or interleaved'
        )
    elif stages_per_place != 1:
        raise ScheduleError(f"{schedule} must have 1 stage a place, but has {stages_per_place}")
    else:
        rows = [
            _woven(
                [(place, microbatch) for microbatch in range(microbatches)],
                [(place, microbatch) for microbatch in range(microbatches)],
                ahead=microbatches if schedule == "gpipe" else places - 1 - place,
            )
            for place in range(places)
        ]
    return tuple(tuple(map(str, row)) for row in rows)


def _interleaved(places: int, microbatches: int, stages_per_place: int) -> list[list[Action]]:
    """Microbatches in rounds of about as many as there are places; a round passes all stages of a place in turn."""
    rounds = max(1, microbatches // places)
    if microbatches % rounds:
        raise ScheduleError(
            f"interleaved takes {microbatches} microbatches on {places} places in {rounds} rounds, "
            f"so they must be a multiple of {rounds}"
        )
    size = microbatches // rounds
    turns = range(stages_per_place)
    rows = []
    for place in range(places):
        forwards, backwards = (
            [
                (turn * places + place, first + microbatch)
                for first in range(0, microbatches, size)
                for turn in order
                for microbatch in range(size)
            ]
            for order in (turns, turns[::-1])
        )
        # A place runs ahead by a round on all its stages but one, and by a microbatch's way to the last place and back.
        rows.append(_woven(forwards, backwards, ahead=(stages_per_place - 1) * size + 2 * (places - 1 - place)))
    return rows


def _woven(forwards: Work, backwards: Work, ahead: int) -> list[Action]:
    """Some forwards first, then a forward and a backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    steady = len(forwards) - ahead
    fs = [Action("F", *work) for work in forwards]
    bs = [Action("B", *work) for work in backwards]
    return [*fs[:ahead], *chain.from_iterable(zip(fs[ahead:], bs[:steady], strict=True)), *bs[steady:]]
