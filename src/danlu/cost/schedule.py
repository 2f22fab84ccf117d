"""The order of a pipeline's actions on every place, for the schedules that a formula gives.

They are the orders that torch.distributed.pipelining runs, which a test holds them against.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, pairwise

from danlu.cost.pipeline import Action, ActionKind, ScheduleError, parse_action
from danlu.spec.plan import LOOPED_SCHEDULES, Schedule

Work = Sequence[tuple[int, int]]
"""Stages and microbatches, in the order they are taken."""
HALVING: tuple[Schedule, ...] = ("zero-bubble", "zbv")
"""Schedules that halve the backward pass."""


def actions_of(
    schedule: Schedule, *, places: int, microbatches: int, stages_per_place: int = 1
) -> tuple[tuple[str, ...], ...]:
    """For every place of the pipeline its actions in order, as `simulate` reads them.

    `gpipe` takes all forwards, then all backwards; `1f1b` begins its backwards as soon as one arrives; `interleaved`
    does so with several stages a place; `zero-bubble` and `zbv` halve the backward, and take the half for weights when
    there is nothing else to do. Raises `ScheduleError` where the numbers do not fit the schedule.
    """
    if schedule == "zbv":
        if stages_per_place != 2:
            raise ScheduleError(f"zbv must have 2 stages a place, but has {stages_per_place}")
        rows = [_zbv(place, places, microbatches) for place in range(places)]
    elif schedule in LOOPED_SCHEDULES:
        rows = _interleaved(places, microbatches, stages_per_place, halved=schedule == "zero-bubble")
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


def _interleaved(places: int, microbatches: int, stages_per_place: int, halved: bool = False) -> list[list[Action]]:
    """Microbatches in rounds of about as many as there are places; a round passes all stages of a place in turn."""
    rounds = max(1, microbatches // places)
    if microbatches % rounds:
        raise ScheduleError(
            f"a looped schedule takes {microbatches} microbatches on {places} places in {rounds} rounds, "
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
        # A place runs ahead by a round on all its stages but one, and by a microbatch's way to the last place and
        # back; where the halves for inputs do not wait for those for weights, by the way there alone.
        way = (places - 1 - place) * (1 if halved else 2)
        ahead = (stages_per_place - 1) * size + way
        if halved:
            rows.append(_woven_in_halves(forwards, backwards, ahead, later=place))
        else:
            rows.append(_woven(forwards, backwards, ahead))
    return rows


def _woven_in_halves(forwards: Work, backwards: Work, ahead: int, later: int) -> list[Action]:
    """Some forwards first, then a forward, a backward for inputs, and one for weights of some backwards before."""
    row: list[Action] = [Action("F", *work) for work in forwards[:ahead]]
    for turn, work in enumerate(backwards):
        if ahead + turn < len(forwards):
            row.append(Action("F", *forwards[ahead + turn]))
        row.append(Action("I", *work))
        if turn >= later:
            row.append(Action("W", *backwards[turn - later]))
    row += [Action("W", *work) for work in backwards[max(0, len(backwards) - later) :]]
    return row


def _zbv(place: int, places: int, microbatches: int) -> list[Action]:
    """Down and up again (Qi et al., "Pipeline parallelism with controllable memory", 2024): both stages of a place.

    Written for enough microbatches to fill the pipeline; with fewer, those that are not there are left out.
    """
    many = max(2 * places - 1, microbatches)
    down, up = _Chunk(place), _Chunk(2 * places - 1 - place)
    row = [down.next("F") for _ in range(2 * (places - place) - 1)]
    for _ in range(place):
        row += [up.next("F"), down.next("F")]
    for _ in range(places - place):
        row += [up.next("F"), up.next("I"), up.next("W")]
    while up.done["F"] < many:
        if down.done["F"] < many:
            row.append(down.next("F"))
        row += [down.next("I"), down.next("W"), up.next("F"), up.next("I"), up.next("W")]
    for _ in range(place):
        row += [down.next("I"), up.next("I")]
    for _ in range(places - place):
        row += [down.next("I"), down.next("W")]
    for chunk in (up, down):
        row += [chunk.next("W") for _ in range(chunk.done["I"] - chunk.done["W"])]
    return [action for action in row if action.microbatch < microbatches]


class _Chunk:
    """One stage of a place, which takes its microbatches in order."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.done: dict[ActionKind, int] = {"F": 0, "I": 0, "W": 0}

    def next(self, kind: ActionKind) -> Action:
        """The next microbatch's action of a kind."""
        self.done[kind] += 1
        return Action(kind, self.stage, self.done[kind] - 1)


def _woven(forwards: Work, backwards: Work, ahead: int) -> list[Action]:
    """Some forwards first, then a forward and a backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    steady = len(forwards) - ahead
    fs = [Action("F", *work) for work in forwards]
    bs = [Action("B", *work) for work in backwards]
    return [*fs[:ahead], *chain.from_iterable(zip(fs[ahead:], bs[:steady], strict=True)), *bs[steady:]]


ACTIVE_STAGES = 3
"""Stages of a place whose parameters torch's looped schedules keep gathered at once."""
_ROUNDS = 4
"""Rounds of microbatches after which a looped schedule only repeats itself."""


@lru_cache(maxsize=1024)
def gathers(schedule: Schedule, places: int, microbatches: int, stages_per_place: int) -> float:
    """How often a step gathers the parameters of a stage, where they are kept as long as the schedule keeps them.

    Once with few stages a place; with more, those that come next push the others out. Long steps are taken for so many
    rounds more of the same.
    """
    if stages_per_place <= ACTIVE_STAGES:
        return 1.0
    rounds = max(1, microbatches // places)
    size = microbatches // rounds
    some = min(rounds, _ROUNDS)
    found = _gathers(schedule, places, some * size, stages_per_place)
    if rounds > some:
        found += (rounds - some) * (_gathers(schedule, places, (some + 1) * size, stages_per_place) - found)
    return found / stages_per_place


def _gathers(schedule: Schedule, places: int, microbatches: int, stages_per_place: int) -> int:
    """Stages gathered on the first place: whenever one is among the next few, and was not before."""
    order = actions_of(schedule, places=places, microbatches=microbatches, stages_per_place=stages_per_place)
    stages = [parse_action(text).stage for text in order[0]]
    coming: list[int] = []
    active: list[set[int]] = []
    for stage in reversed(stages):
        coming = [stage, *(other for other in coming if other != stage)]
        active.append(set(coming[:ACTIVE_STAGES]))
    active.reverse()
    return len(active[0]) + sum(len(after - before) for before, after in pairwise(active))
