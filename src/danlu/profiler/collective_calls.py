"""The collectives of a step in the order of their calls, with the group and the type that a profiler does not see."""

from dataclasses import replace
from typing import Any

from torch.distributed.tensor import DTensor

from danlu.comm.collective_call import (
    DTYPE_BYTES,
    collective_operation,
    input_position,
    is_collective,
    parse_collective,
)
from danlu.profiler.profiler_events import ProfilerEvent, RankCollective, is_collective_name
from danlu.torch_compat import TorchDispatchMode


class CollectiveRecorder(TorchDispatchMode):
    """Lists the collectives of what runs inside; it slows every operator down, so nothing is timed meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[RankCollective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its operators on local tensors are seen instead
        if is_collective(func) and (call := parse_collective(func, args)) is not None:
            self.calls.append(RankCollective(call.operation, call.dtype, call.size, call.axes, call.group.size()))
        return func(*args, **(kwargs or {}))


class CollectiveMismatchError(RuntimeError):
    """A profiled step called other collectives than the step before it."""


def match_calls(step: ProfilerEvent, recorded: list[RankCollective]) -> dict[ProfilerEvent, RankCollective]:
    """The collective of every event of a profiled step that calls one.

    All steps call the same collectives in the same order; only the sizes of what experts exchange differ, and those
    are in the event.
    """
    called = [event for event in _calls_in(step) if collective_operation(event.name) is not None]
    names = [collective_operation(event.name) for event in called]
    if names != [call.operation for call in recorded]:
        raise CollectiveMismatchError(
            f"a profiled step called {len(called)} collectives, the step before it {len(recorded)}, or others: their "
            "groups cannot be told; profile fewer steps, or report this with the plan"
        )
    return {event: _as_called(event, call) for event, call in zip(called, recorded, strict=True)}


def _calls_in(event: ProfilerEvent) -> list[ProfilerEvent]:
    """Outermost collectives: a functional one calls one of the group."""
    if event.is_operator and is_collective_name(event.name):
        return [event]
    return [found for child in event.children for found in _calls_in(child)]


def _as_called(event: ProfilerEvent, recorded: RankCollective) -> RankCollective:
    position = input_position(event.name)
    if position >= len(event.shapes):
        return recorded
    return replace(recorded, payload=_elements(event.shapes[position]) * DTYPE_BYTES[recorded.dtype])


def _elements(sizes: Any) -> int:
    """Elements of a tensor of these sizes, or of a list of tensors."""
    if sizes and isinstance(sizes[0], list):
        return sum(map(_elements, sizes))
    count = 1
    for size in sizes:
        count *= size
    return count
