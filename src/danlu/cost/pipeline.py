"""When every action of a pipeline begins and ends, from the order of the actions and how long each takes.

A place of the pipeline takes its actions one after another, in the order given, each as soon as what it needs is
there. So the times follow from the order alone, and any schedule that can be written down can be timed: uneven
stages, several stages a place, halves of the backward pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

ActionKind = Literal["F", "B", "I", "W"]
"""Forward; whole backward; the halves of a backward for inputs and for weights."""
ACTION_KINDS: tuple[ActionKind, ...] = get_args(ActionKind)

Durations = Mapping[tuple[ActionKind, int], float]
"""Time of every kind of action on every stage, in any unit: the timeline has the same."""
Order = Sequence[Sequence[str]]
"""For every place its actions in order, as in `DryRun.schedule`: `F0.3` is the forward of stage 0 for microbatch 3."""

_Result = tuple[str, int, int]
"""What an action leaves behind for others, of a stage and a microbatch: `F` activations, `B` gradients of inputs
(whether a `B` or an `I` made them), `I` what a `W` begins from."""


class ScheduleError(ValueError):
    """The order of a pipeline's actions cannot be run."""


class Action(NamedTuple):
    """One box of the schedule."""

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


class Slot(NamedTuple):
    """An action and when it runs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A step of the pipeline, timed."""

    slots: tuple[tuple[Slot, ...], ...]
    """For every place its actions in order."""

    @cached_property
    def total(self) -> float:
        """From the first start to the last end of any place."""
        return max((row[-1].end for row in self.slots if row), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long every place works."""
        return tuple(sum(slot.end - slot.start for slot in row) for row in self.slots)

    @property
    def bubble(self) -> float:
        """Share of all places' time in which they wait; (p - 1) / (m + p - 1) for `1f1b` with equal stages."""
        return 1 - sum(self.busy) / (self.total * len(self.slots)) if self.total else 0.0


def parse_action(text: str) -> Action:
    """Read `F0.3`; raises `ScheduleError` for anything else."""
    kind, (stage, dot, microbatch) = text[:1], text[1:].partition(".")
    if kind not in ACTION_KINDS or not dot or not (stage.isdecimal() and microbatch.isdecimal()):
        raise ScheduleError(
            f'an action must be one of {", ".join(ACTION_KINDS)}, a stage and a microbatch such as "F0.3", '
            f'but is "{text}"'
        )
    return Action(kind, int(stage), int(microbatch))


def simulate(order: Order, durations: Durations, transfers: Mapping[tuple[int, int], float] | None = None) -> Timeline:
    """Time a pipeline: what runs when on every place, how long the step takes, and how much of it is idle.

    A forward needs the forward of the stage before it; a backward (`B`, `I`) the one of the stage behind it, and its
    own forward; `W` needs its own `I`. Where the two stages lie on different places, what is needed arrives later by
    the transfer from the one place to the other; a transfer holds neither of them up. Pairs of places that
    `transfers` leaves out take no time.

    Raises `ScheduleError` if an action cannot be read, comes twice or has no duration, if a stage lies on two places,
    or if places wait for each other for ever.
    """
    rows = [[parse_action(text) for text in row] for row in order]
    home = _homes(rows)
    _check_durations(rows, durations)
    ahead, back = _delays(home, transfers or {})
    slots: list[list[Slot]] = [[] for _ in rows]
    clocks = [0.0] * len(rows)
    done: dict[_Result, float] = {}
    waiting: dict[_Result, list[int]] = {}
    runnable = list(range(len(rows)))
    while runnable:
        place = runnable.pop()
        row, clock, taken = rows[place], clocks[place], slots[place]
        while len(taken) < len(row):
            action = row[len(taken)]
            start = clock
            missing = None
            for need, delay in _needs(action, ahead, back):
                ready = done.get(need)
                if ready is None:
                    missing = need
                    break
                start = max(start, ready + delay)
            if missing:
                waiting.setdefault(missing, []).append(place)
                break
            clock = start + durations[action.kind, action.stage]
            taken.append(Slot(action, start, clock))
            for result in _results(action):
                done[result] = clock
                if result in waiting:
                    runnable += waiting.pop(result)
        clocks[place] = clock
    if any(len(taken) < len(row) for taken, row in zip(slots, rows, strict=True)):
        raise ScheduleError(_standstill(rows, slots, done, len(home)))
    return Timeline(tuple(tuple(row) for row in slots))


def _needs(action: Action, ahead: Sequence[float], back: Sequence[float]) -> tuple[tuple[_Result, float], ...]:
    """What must be there before an action, and how long it is on its way."""
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


def _homes(rows: Sequence[Sequence[Action]]) -> list[int]:
    """The place of every stage, after checking that it has one, and only one, and that no action comes twice."""
    home: dict[int, int] = {}
    for place, row in enumerate(rows):
        if len(set(row)) < len(row):
            twice = next(action for index, action in enumerate(row) if action in row[:index])
            raise ScheduleError(f"every action must come once, but {twice} comes twice on place {place}")
        for stage in {action.stage for action in row}:
            other = home.setdefault(stage, place)
            if other != place:
                raise ScheduleError(f"a stage must lie on one place, but stage {stage} lies on {other} and {place}")
    missing = set(range(len(home))) - set(home)
    if missing:
        raise ScheduleError(
            f"stages must count from 0 without a gap, but {_listed(sorted(missing))} of {max(home) + 1} has no action"
        )
    return [home[stage] for stage in range(len(home))]


def _check_durations(rows: Sequence[Sequence[Action]], durations: Durations) -> None:
    for kind, stage in sorted({(action.kind, action.stage) for row in rows for action in row}):
        duration = durations.get((kind, stage))
        if duration is None:
            raise ScheduleError(f"every action must have a duration, but {kind} of stage {stage} has none")
        if not duration >= 0:
            raise ScheduleError(f"a duration must be 0 or more, but {kind} of stage {stage} takes {duration}")


def _delays(home: Sequence[int], transfers: Mapping[tuple[int, int], float]) -> tuple[list[float], list[float]]:
    """For every stage how long its activations are on their way to the next, and its gradients to the one before."""
    last = len(home) - 1
    ahead = [transfers.get((home[stage], home[min(stage + 1, last)]), 0.0) for stage in range(len(home))]
    back = [transfers.get((home[stage], home[max(stage - 1, 0)]), 0.0) for stage in range(len(home))]
    return ahead, back


def _standstill(
    rows: Sequence[Sequence[Action]],
    slots: Sequence[Sequence[Slot]],
    done: Mapping[_Result, float],
    stages: int,
) -> str:
    """Who waits for what, in words."""
    somewhere = {result for row in rows for action in row for result in _results(action)}
    nowhere = [0.0] * stages
    words = []
    for place, (row, taken) in enumerate(zip(rows, slots, strict=True)):
        if len(taken) == len(row):
            continue
        action = row[len(taken)]
        need = next(need for need, _ in _needs(action, nowhere, nowhere) if need not in done)
        never = "" if need in somewhere else ", which no place runs"
        words.append(f"place {place} waits at {action} for {Action(*need)}{never}")  # type: ignore[arg-type]
    return f"the schedule must come to an end, but {_listed(words, '; ')}"


def _listed(items: Sequence[object], joint: str = ", ") -> str:
    """The first few, and how many more there are."""
    most = 4
    more = f"{joint}{len(items) - most} more" if len(items) > most else ""
    return joint.join(str(item) for item in items[:most]) + more
