"""The order of actions on every pp rank, for schedules with a closed-form order.

They are the orders of torch.distributed.pipelining; a test compares them.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, pairwise

from danlu.cost.pipeline_simulator import Action, ActionKind, ScheduleError, parse_action
from danlu.spec.plan import LOOPED_SCHEDULES, PipelineSchedule

StageMicrobatches = Sequence[tuple[int, int]]
"""Stages and microbatches, in execution order."""
SPLIT_BACKWARD_SCHEDULES: tuple[PipelineSchedule, ...] = ("zero-bubble", "zbv")
"""Schedules that split the backward pass into inputs and weights."""


def pipeline_actions(
    schedule: PipelineSchedule, *, pp_ranks: int, microbatches: int, stages_per_rank: int = 1
) -> tuple[tuple[str, ...], ...]:
    """The actions of every pp rank in order, in the form that `simulate` reads.

    `gpipe` runs all forwards, then all backwards; `1f1b` begins its backwards as soon as one arrives; `interleaved`
    does so with several stages per rank; `zero-bubble` and `zbv` split the backward, and run the half for weights when
    there is nothing else to do. Raises `ScheduleError` if the numbers do not fit the schedule.
    """
    if schedule == "zbv":
        if stages_per_rank != 2:
            raise ScheduleError(f"zbv needs 2 stages per rank, but has {stages_per_rank}")
        rows = [_zbv(rank, pp_ranks, microbatches) for rank in range(pp_ranks)]
    elif schedule in LOOPED_SCHEDULES:
        rows = _interleaved(pp_ranks, microbatches, stages_per_rank, halved=schedule == "zero-bubble")
    elif stages_per_rank != 1:
        raise ScheduleError(f"{schedule} needs 1 stage per rank, but has {stages_per_rank}")
    else:
        rows = [
            _interleave_fb(
                [(rank, microbatch) for microbatch in range(microbatches)],
                [(rank, microbatch) for microbatch in range(microbatches)],
                ahead=microbatches if schedule == "gpipe" else pp_ranks - 1 - rank,
            )
            for rank in range(pp_ranks)
        ]
    return tuple(tuple(map(str, row)) for row in rows)


def _interleaved(pp_ranks: int, microbatches: int, stages_per_rank: int, halved: bool = False) -> list[list[Action]]:
    """Microbatches in rounds of about as many as there are ranks; a round passes all stages of a rank in turn."""
    rounds = max(1, microbatches // pp_ranks)
    if microbatches % rounds:
        raise ScheduleError(
            f"a looped schedule runs {microbatches} microbatches on {pp_ranks} ranks in {rounds} rounds, "
            f"so they must be a multiple of {rounds}"
        )
    size = microbatches // rounds
    turns = range(stages_per_rank)
    rows = []
    for rank in range(pp_ranks):
        forwards, backwards = (
            [
                (turn * pp_ranks + rank, first + microbatch)
                for first in range(0, microbatches, size)
                for turn in order
                for microbatch in range(size)
            ]
            for order in (turns, turns[::-1])
        )
        # A rank runs ahead by a round on all its stages but one, and by a microbatch's way to the last rank and
        # back; where the halves for inputs do not wait for those for weights, by the way there alone.
        way = (pp_ranks - 1 - rank) * (1 if halved else 2)
        ahead = (stages_per_rank - 1) * size + way
        if halved:
            rows.append(_interleave_fiw(forwards, backwards, ahead, later=rank))
        else:
            rows.append(_interleave_fb(forwards, backwards, ahead))
    return rows


def _interleave_fiw(forwards: StageMicrobatches, backwards: StageMicrobatches, ahead: int, later: int) -> list[Action]:
    """Some forwards first, then one forward, one backward for inputs, and one for weights of an earlier backward."""
    row: list[Action] = [Action("F", *work) for work in forwards[:ahead]]
    for turn, work in enumerate(backwards):
        if ahead + turn < len(forwards):
            row.append(Action("F", *forwards[ahead + turn]))
        row.append(Action("I", *work))
        if turn >= later:
            row.append(Action("W", *backwards[turn - later]))
    row += [Action("W", *work) for work in backwards[max(0, len(backwards) - later) :]]
    return row


def _zbv(rank: int, pp_ranks: int, microbatches: int) -> list[Action]:
    """V shape (Qi et al., "Pipeline parallelism with controllable memory", 2024): both stages of a rank.

    Written for enough microbatches to fill the pipeline; with fewer, the missing ones are skipped.
    """
    many = max(2 * pp_ranks - 1, microbatches)
    down, up = _Chunk(rank), _Chunk(2 * pp_ranks - 1 - rank)
    row = [down.next("F") for _ in range(2 * (pp_ranks - rank) - 1)]
    for _ in range(rank):
        row += [up.next("F"), down.next("F")]
    for _ in range(pp_ranks - rank):
        row += [up.next("F"), up.next("I"), up.next("W")]
    while up.done["F"] < many:
        if down.done["F"] < many:
            row.append(down.next("F"))
        row += [down.next("I"), down.next("W"), up.next("F"), up.next("I"), up.next("W")]
    for _ in range(rank):
        row += [down.next("I"), up.next("I")]
    for _ in range(pp_ranks - rank):
        row += [down.next("I"), down.next("W")]
    for chunk in (up, down):
        row += [chunk.next("W") for _ in range(chunk.done["I"] - chunk.done["W"])]
    return [action for action in row if action.microbatch < microbatches]


class _Chunk:
    """One stage of a rank, which runs its microbatches in order."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.done: dict[ActionKind, int] = {"F": 0, "I": 0, "W": 0}

    def next(self, kind: ActionKind) -> Action:
        """The next microbatch's action of a kind."""
        self.done[kind] += 1
        return Action(kind, self.stage, self.done[kind] - 1)


def _interleave_fb(forwards: StageMicrobatches, backwards: StageMicrobatches, ahead: int) -> list[Action]:
    """Some forwards first, then a forward and a backward in turn, then the remaining backwards."""
    ahead = min(ahead, len(forwards))
    steady = len(forwards) - ahead
    fs = [Action("F", *work) for work in forwards]
    bs = [Action("B", *work) for work in backwards]
    return [*fs[:ahead], *chain.from_iterable(zip(fs[ahead:], bs[:steady], strict=True)), *bs[steady:]]


MAX_ACTIVE_STAGES = 3
"""Stages of a rank whose parameters torch's looped schedules keep gathered at once."""
_ROUNDS = 4
"""Rounds of microbatches after which a looped schedule only repeats itself."""


@lru_cache(maxsize=1024)
def gathers_per_stage(schedule: PipelineSchedule, pp_ranks: int, microbatches: int, stages_per_rank: int) -> float:
    """How often a step gathers the parameters of a stage, if they are kept as long as the schedule keeps them.

    Once with few stages per rank; with more, the next ones evict the others. Long steps are extrapolated from a few
    rounds.
    """
    if stages_per_rank <= MAX_ACTIVE_STAGES:
        return 1.0
    rounds = max(1, microbatches // pp_ranks)
    size = microbatches // rounds
    some = min(rounds, _ROUNDS)
    found = _gathers(schedule, pp_ranks, some * size, stages_per_rank)
    if rounds > some:
        found += (rounds - some) * (_gathers(schedule, pp_ranks, (some + 1) * size, stages_per_rank) - found)
    return found / stages_per_rank


def _gathers(schedule: PipelineSchedule, pp_ranks: int, microbatches: int, stages_per_rank: int) -> int:
    """Stages gathered on the first rank: whenever one is among the next few, and was not before."""
    order = pipeline_actions(schedule, pp_ranks=pp_ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    stages = [parse_action(text).stage for text in order[0]]
    coming: list[int] = []
    active: list[set[int]] = []
    for stage in reversed(stages):
        coming = [stage, *(other for other in coming if other != stage)]
        active.append(set(coming[:MAX_ACTIVE_STAGES]))
    active.reverse()
    return len(active[0]) + sum(len(after - before) for before, after in pairwise(active))
