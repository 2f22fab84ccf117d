"""When every action of a pipeline begins and ends, from the order of the actions and how long each takes.

A pp rank runs its actions one after another, in the order given, each as soon as its inputs have arrived. So the times
follow from the order alone, and any schedule can be timed: uneven stages, several stages per rank, split backward
passes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

ActionKind = Literal["F", "B", "I", "W"]
"""Forward; full backward; the halves of a backward for inputs and for weights."""
ACTION_KINDS: tuple[ActionKind, ...] = get_args(ActionKind)

Durations = Mapping[tuple[ActionKind, int], float]
"""Time of every kind of action on every stage, in any unit; the timeline has the same unit."""
ActionOrder = Sequence[Sequence[str]]
"""The actions of every pp rank in order, as in `DryRun.schedule`: `F0.3` is the forward of stage 0, microbatch 3."""

_Result = tuple[str, int, int]
"""Output of an action, of a stage and a microbatch: `F` activations, `B` gradients of inputs (from a `B` or an `I`),
`I` the input of a `W`."""


class ScheduleError(ValueError):
    """The order of a pipeline's actions cannot be run."""


class Action(NamedTuple):
    """One action of the schedule."""

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


class TimedAction(NamedTuple):
    """An action and when it runs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class PipelineTimeline:
    """A step of the pipeline, timed."""

    actions_by_rank: tuple[tuple[TimedAction, ...], ...]
    """The actions of every pp rank in order."""

    @cached_property
    def total(self) -> float:
        """From the first start to the last end of any rank."""
        return max((row[-1].end for row in self.actions_by_rank if row), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Busy time of every rank."""
        return tuple(sum(action.end - action.start for action in row) for row in self.actions_by_rank)

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time spent waiting; (p - 1) / (m + p - 1) for `1f1b` with equal stages."""
        return 1 - sum(self.busy) / (self.total * len(self.actions_by_rank)) if self.total else 0.0


def parse_action(text: str) -> Action:
    """Read `F0.3`; raises `ScheduleError` for anything else."""
    kind, (stage, dot, microbatch) = text[:1], text[1:].partition(".")
    if kind not in ACTION_KINDS or not dot or not (stage.isdecimal() and microbatch.isdecimal()):
        raise ScheduleError(
            f'an action must be one of {", ".join(ACTION_KINDS)}, a stage and a microbatch such as "F0.3", '
            f'but is "{text}"'
        )
    return Action(kind, int(stage), int(microbatch))


def simulate(
    order: ActionOrder, durations: Durations, transfers: Mapping[tuple[int, int], float] | None = None
) -> PipelineTimeline:
    """Time a pipeline: what runs when on every rank, how long the step takes, and how much of it is idle.

    A forward needs the forward of the previous stage; a backward (`B`, `I`) that of the next stage, and its own
    forward; `W` needs its own `I`. If the two stages lie on different ranks, the input arrives later by the transfer
    from the one rank to the other; a transfer blocks neither of them. Pairs of ranks missing from `transfers` take no
    time.

    Raises `ScheduleError` if an action cannot be parsed, occurs twice or has no duration, if a stage lies on two ranks,
    or if ranks deadlock.
    """
    rows = [[parse_action(text) for text in row] for row in order]
    rank_of = _stage_ranks(rows)
    _check_durations(rows, durations)
    ahead, back = _delays(rank_of, transfers or {})
    timed: list[list[TimedAction]] = [[] for _ in rows]
    clocks = [0.0] * len(rows)
    done: dict[_Result, float] = {}
    waiting: dict[_Result, list[int]] = {}
    runnable = list(range(len(rows)))
    while runnable:
        rank = runnable.pop()
        row, clock, taken = rows[rank], clocks[rank], timed[rank]
        while len(taken) < len(row):
            action = row[len(taken)]
            start = clock
            missing = None
            for need, delay in _dependencies(action, ahead, back):
                ready = done.get(need)
                if ready is None:
                    missing = need
                    break
                start = max(start, ready + delay)
            if missing:
                waiting.setdefault(missing, []).append(rank)
                break
            clock = start + durations[action.kind, action.stage]
            taken.append(TimedAction(action, start, clock))
            for result in _results(action):
                done[result] = clock
                if result in waiting:
                    runnable += waiting.pop(result)
        clocks[rank] = clock
    if any(len(taken) < len(row) for taken, row in zip(timed, rows, strict=True)):
        raise ScheduleError(_describe_deadlock(rows, timed, done, len(rank_of)))
    return PipelineTimeline(tuple(tuple(row) for row in timed))


def _dependencies(action: Action, ahead: Sequence[float], back: Sequence[float]) -> tuple[tuple[_Result, float], ...]:
    """The inputs of an action, and the transfer time of each."""
    kind, stage, microbatch = action
    if kind == "F":
        return ((("F", stage - 1, microbatch), ahead[stage - 1]),) if stage > 0 else ()
    if kind == "W":
        return ((("I", stage, microbatch), 0.0),)
    own: tuple[_Result, float] = (("F", stage, microbatch), 0.0)
    return (own, (("B", stage + 1, microbatch), back[stage + 1])) if stage + 1 < len(back) else (own,)


def _results(action: Action) -> tuple[_Result, ...]:
    kind, stage, microbatch = action
    if kind == "I":
        return ("B", stage, microbatch), ("I", stage, microbatch)
    return () if kind == "W" else ((kind, stage, microbatch),)


def _stage_ranks(rows: Sequence[Sequence[Action]]) -> list[int]:
    """The pp rank of every stage, after checking that it has exactly one, and that no action occurs twice."""
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(rows):
        if len(set(row)) < len(row):
            twice = next(action for index, action in enumerate(row) if action in row[:index])
            raise ScheduleError(f"every action must occur once, but {twice} occurs twice on rank {rank}")
        for stage in {action.stage for action in row}:
            other = rank_of.setdefault(stage, rank)
            if other != rank:
                raise ScheduleError(f"a stage must lie on one rank, but stage {stage} lies on {other} and {rank}")
    missing = set(range(len(rank_of))) - set(rank_of)
    if missing:
        raise ScheduleError(
            f"stages must be numbered from 0 without a gap, but {_join_first(sorted(missing))} of {max(rank_of) + 1} "
            "has no action"
        )
    return [rank_of[stage] for stage in range(len(rank_of))]


def _check_durations(rows: Sequence[Sequence[Action]], durations: Durations) -> None:
    for kind, stage in sorted({(action.kind, action.stage) for row in rows for action in row}):
        duration = durations.get((kind, stage))
        if duration is None:
            raise ScheduleError(f"every action must have a duration, but {kind} of stage {stage} has none")
        if not duration >= 0:
            raise ScheduleError(f"a duration must be 0 or more, but {kind} of stage {stage} takes {duration}")


def _delays(rank_of: Sequence[int], transfers: Mapping[tuple[int, int], float]) -> tuple[list[float], list[float]]:
    """Transfer time of every stage's activations to the next stage, and of its gradients to the previous one."""
    last = len(rank_of) - 1
    ahead = [transfers.get((rank_of[stage], rank_of[min(stage + 1, last)]), 0.0) for stage in range(len(rank_of))]
    back = [transfers.get((rank_of[stage], rank_of[max(stage - 1, 0)]), 0.0) for stage in range(len(rank_of))]
    return ahead, back


def _describe_deadlock(
    rows: Sequence[Sequence[Action]],
    timed: Sequence[Sequence[TimedAction]],
    done: Mapping[_Result, float],
    stages: int,
) -> str:
    """Which rank waits for which action."""
    somewhere = {result for row in rows for action in row for result in _results(action)}
    nowhere = [0.0] * stages
    words = []
    for rank, (row, taken) in enumerate(zip(rows, timed, strict=True)):
        if len(taken) == len(row):
            continue
        action = row[len(taken)]
        need = next(need for need, _ in _dependencies(action, nowhere, nowhere) if need not in done)
        never = "" if need in somewhere else ", which no rank runs"
        words.append(f"rank {rank} waits at {action} for {Action(*need)}{never}")  # type: ignore[arg-type]
    return f"the schedule must finish, but {_join_first(words, '; ')}"


def _join_first(items: Sequence[object], joint: str = ", ") -> str:
    """The first few, and how many more there are."""
    most = 4
    more = f"{joint}{len(items) - most} more" if len(items) > most else ""
    return joint.join(str(item) for item in items[:most]) + more
