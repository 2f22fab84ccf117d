"""The events of torch's profiler as a tree: what ran inside what, on the thread that takes the steps."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

STEP, STAGE, MODULE = "danlu.step:", "danlu.stage:", "danlu.module:"
"""Beginnings of the names of annotations: a step, a stage of the training loop, a module of the model."""
RECOMPUTE, WAIT = "danlu.recompute", "danlu.wait"
"""Annotations of a region that the backward pass runs again, and of waiting for a collective."""
ANNOTATIONS = (STEP, STAGE, MODULE, RECOMPUTE, WAIT)

BACKWARD_NODE = "autograd::engine::evaluate_function: "
_TREE_CATEGORIES = ("cpu_op", "user_annotation")


@dataclass(slots=True, eq=False)
class ProfilerEvent:
    """Something that a thread did, with what it did inside; times are in microseconds."""

    name: str
    start: float
    end: float
    is_operator: bool = True
    """An operator of torch; else an annotation, which says where the operators inside it belong."""
    sequence: int | None = None
    """Number of the autograd node that an operator makes, or that a backward node is."""
    shapes: tuple[Any, ...] = ()
    """Sizes of the operator's arguments: a list per tensor, a list of lists per list of tensors."""
    children: list["ProfilerEvent"] = field(default_factory=list)

    @property
    def duration(self) -> float:
        """Microseconds, what is inside included."""
        return self.end - self.start

    @property
    def own_time(self) -> float:
        """Microseconds outside of what is inside."""
        return self.duration - sum(child.duration for child in self.children)

    @property
    def is_node(self) -> bool:
        """Whether this is a node of the backward pass."""
        return self.name.startswith(BACKWARD_NODE)

    def walk(self) -> Iterator["ProfilerEvent"]:
        """This event and everything inside, in order of time."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class RankCollective:
    """One collective as one rank calls it."""

    operation: str
    dtype: str
    payload: int
    """Bytes of this rank's input (of its output for a receive)."""
    axes: str
    ranks: int


def is_collective_name(name: str) -> bool:
    """Whether an operator of this name communicates, or waits."""
    return name.startswith(("c10d::", "_c10d_functional::"))


def step_trees(records: Iterable[dict[str, Any]]) -> list[ProfilerEvent]:
    """The steps in the records of a Chrome trace that torch's profiler wrote, each with what its thread did."""
    found = [record for record in records if record.get("ph") == "X" and record.get("cat") in _TREE_CATEGORIES]
    threads = {record["tid"] for record in found if record["name"].startswith(STEP)}
    if len(threads) != 1:
        raise ValueError(f"one thread must take the profiled steps, but {len(threads)} did")
    events = [_event(record) for record in found if record["tid"] in threads]
    return [root for root in nest(events) if root.name.startswith(STEP)]


def nest(events: Iterable[ProfilerEvent]) -> list[ProfilerEvent]:
    """Put the events of one thread inside each other by their times; those inside no other are returned.

    Two clock readings of one moment may differ by a nanosecond: what begins inside another event ends with it.
    """
    roots: list[ProfilerEvent] = []
    stack: list[ProfilerEvent] = []
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        while stack and event.start >= stack[-1].end:
            stack.pop()
        if stack:
            event.end = min(event.end, stack[-1].end)
            stack[-1].children.append(event)
        else:
            roots.append(event)
        stack.append(event)
    return roots


def _event(record: dict[str, Any]) -> ProfilerEvent:
    args = record.get("args", {})
    return ProfilerEvent(
        name=record["name"],
        start=record["ts"],
        end=record["ts"] + record.get("dur", 0.0),
        is_operator=record["cat"] == "cpu_op" and not record["name"].startswith(ANNOTATIONS),
        sequence=args.get("Sequence number"),
        shapes=tuple(args.get("Input Dims", ())),
    )
