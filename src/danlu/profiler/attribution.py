"""Which part of a step the time of every event belongs to, by the names that `danlu plan` gives to parts.

A step is a tree of events of one thread. The time of an event outside of what is inside it belongs to exactly one part,
so parts add up to the step.
"""

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from danlu.profiler.profiler_events import (
    MODULE,
    RECOMPUTE,
    STAGE,
    STEP,
    WAIT,
    ProfilerEvent,
    RankCollective,
    is_collective_name,
)
from danlu.spec.trace import Phase

Stage = Literal["batch", "passes", "metrics", "optimizer"]
ENDS = ("embed", "head", "loss")
"""Modules whose time is the part `head`, with the collectives inside them."""
_MATMULS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "_grouped_mm", "grouped_mm", "_scaled_mm", "einsum")
_ATTENTION = ("scaled_dot_product", "_flash_attention", "_efficient_attention", "flex_attention", "masked_attention")
_COMPILED = ("Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph")
_ACCUMULATE = "AccumulateGrad"
_FUNCTIONAL = "_c10d_functional::"
_WAITS = (WAIT, "_c10d_functional::wait_tensor")


class Place(NamedTuple):
    """Where in a step an event is."""

    stage: Stage | None = None
    """The stage of the training loop; None in the loop itself."""
    phase: Phase = "forward"
    module: str = ""
    unit: bool = False
    """Inside FSDP's own work: gathering parameters, reducing gradients."""
    attention: bool = False
    """Inside attention over full sequences."""
    accumulates: bool = False
    """Adds to a gradient."""
    compiled: bool = False
    """Inside code of a compiler: what no operator does there is fused kernels."""


@dataclass(eq=False)
class CalledCollective:
    """A collective in a profiled step: when it was called, how long the rank waited for it."""

    call: RankCollective
    part: str
    start: float
    end: float
    """When the rank had waited for it, or when it was called if it never did."""
    exposed: float = 0.0
    """Microseconds in which the rank called it or waited for it."""


@dataclass
class StepAttribution:
    """One step: its microseconds by part, and its collectives."""

    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    places: dict[ProfilerEvent, Place] = field(default_factory=dict)
    """Where every event is."""
    part_of: dict[ProfilerEvent, str] = field(default_factory=dict)
    """The part that an event's own time belongs to."""
    collectives: list[CalledCollective] = field(default_factory=list)


class _Attributor:
    """Walks through one step in order of time."""

    def __init__(self, calls: Mapping[ProfilerEvent, RankCollective], pipeline: bool) -> None:
        self.found = StepAttribution()
        self._calls, self._pipeline = calls, pipeline
        self._made_by: dict[int, Place] = {}
        """Where the autograd node with this number was made."""
        self._last_node = Place()
        self._pending: dict[str, deque[CalledCollective]] = defaultdict(deque)
        """Collectives that nobody has waited for: functional ones, FSDP's and others."""
        self._latest: CalledCollective | None = None
        """The collective that was called last, while nothing has run since."""

    def visit(self, event: ProfilerEvent, around: Place) -> None:
        """Attribute an event and what is inside."""
        place = self._place(event, around)
        self.found.places[event] = place
        if event in self._calls or event.name in _WAITS:
            part = self.found.part_of[event] = self._collective_part(event, place)
            self.found.parts[part] += event.duration  # with the copies that it makes inside
            return
        self._latest = None
        if event.sequence is not None and place.phase == "forward" and not event.is_node:
            self._made_by[event.sequence] = place  # the last operator before the next number made the node
        part = self.found.part_of[event] = part_of(event, place)
        self.found.parts[part] += event.own_time
        for child in event.children:
            self.visit(child, place)

    def visit_step(self, step: ProfilerEvent) -> None:
        """Attribute a step: what follows the metrics, outside of stages, is the optimizer."""
        self.found.parts["other"] += step.own_time
        self.found.part_of[step], self.found.places[step] = "other", Place()
        measured = False
        for child in step.children:
            self.visit(child, Place("optimizer", "optimizer") if measured else Place())
            measured = measured or child.name == f"{STAGE}metrics"

    def _place(self, event: ProfilerEvent, around: Place) -> Place:
        name = event.name
        if name.startswith(STAGE):
            stage: Stage = name.removeprefix(STAGE)  # type: ignore[assignment]
            return around._replace(stage=stage, phase="forward" if stage in ("batch", "passes") else "optimizer")
        if name.startswith(MODULE):
            return around._replace(module=name.removeprefix(MODULE), phase=_again(around))
        if name == RECOMPUTE:
            return around._replace(phase="recompute")
        if event.is_node:
            made = self._made_by.get(event.sequence) if event.sequence is not None else None
            self._last_node = made = (made or self._last_node)._replace(unit=False)
            accumulates = event.name.endswith(_ACCUMULATE)
            return made._replace(stage=around.stage, phase="backward", accumulates=accumulates, compiled=False)
        if name.startswith("FSDP::"):
            return around._replace(unit=True)
        if any(word in name for word in _ATTENTION):
            return around._replace(attention=True)
        if name.startswith(_COMPILED):
            return around._replace(compiled=True)
        return around

    def _collective_part(self, event: ProfilerEvent, place: Place) -> str:
        call = self._calls.get(event)
        if call is not None:
            functional = event.name.startswith(_FUNCTIONAL)
            part = collective_part(call, place, self._pipeline, functional)
            called = CalledCollective(call, part, event.start, event.end, event.duration)
            self.found.collectives.append(called)
            self._pending[_queue(event, place)].append(called)
            self._latest = called
            return part
        waited = self._latest
        pending = self._pending[_queue(event, place)]
        if waited is None or waited not in pending:
            waited = pending[0] if pending else None
        self._latest = None
        if waited is None:  # a second wait for what is done already
            return part_of(event, place)
        pending.remove(waited)
        waited.end = event.end
        waited.exposed += event.duration
        return waited.part


def attribute_step(
    step: ProfilerEvent, calls: Mapping[ProfilerEvent, RankCollective], *, pipeline: bool
) -> StepAttribution:
    """Give the time of a step to its parts; `calls` are its collectives, as `match_calls` found them.

    With a `pipeline`, waiting for all ranks at the end of a step is part of its bubble.
    """
    assert step.name.startswith(STEP)
    attributor = _Attributor(calls, pipeline)
    attributor.visit_step(step)
    return attributor.found


def part_of(event: ProfilerEvent, place: Place) -> str:
    """The part of an event's own time, if the event does not communicate."""
    is_host = not event.is_operator or event.is_node or _is_dispatch(event)
    if place.unit:
        return "gather"
    if place.stage in (None, "batch") or (place.stage == "metrics" and is_host):
        return "other"
    is_matmul = event.name.removeprefix("aten::") in _MATMULS
    if place.stage in ("metrics", "optimizer"):
        return "orthogonalization" if is_matmul else "optimizer"
    if is_host and not place.compiled:
        return "waiting"
    if place.accumulates:
        return "accumulate"
    if place.module.split(".")[0] in ENDS:
        return "head"
    if place.phase == "recompute":
        return "recompute"
    if place.attention:
        return "attention"
    return "linear" if is_matmul else "elementwise"


def collective_part(call: RankCollective, place: Place, pipeline: bool, functional: bool = False) -> str:
    """The part of calling a collective and of waiting for it.

    The operation and the module decide where the axes do not: a group of all ranks is called `world`, whichever axis
    it lies along. FSDP's own calls are not `functional`, those of DTensors are.
    """
    is_p2p, in_attention = call.operation in ("send", "receive"), ".attention" in place.module
    if place.unit and not functional:
        return "gradients" if call.operation == "all_reduce" else "gather"
    if place.stage == "metrics":
        return "bubble" if pipeline else "stragglers"  # the ranks meet here: the faster ones wait
    if place.stage != "passes":
        return "exchange" if place.stage == "optimizer" else "other"
    if call.axes == "cp" or (in_attention and (is_p2p or call.operation == "all_to_all")):
        return "context"
    if call.axes == "pp" or is_p2p:
        return "transfer"
    if place.module.split(".")[0] in ENDS:
        return "head"
    if call.axes == "ep" or call.operation == "all_to_all" or ".router" in place.module:
        return "expert"
    return "tensor"


def _again(around: Place) -> Phase:
    """The phase of a module that is called: inside a node of the backward pass it runs again."""
    return "recompute" if around.phase in ("backward", "recompute") else "forward"


def _queue(event: ProfilerEvent, place: Place) -> str:
    if event.name.startswith(_FUNCTIONAL):
        return "functional"
    return "unit" if place.unit else "group"


def _is_dispatch(event: ProfilerEvent) -> bool:
    """Whether Python runs and decides what an operator does: one on DTensors holds that on local tensors."""
    name = event.name
    if name == "PythonSubclass" or "::" not in name or is_collective_name(name):
        return True
    inner = [*event.children, *(each for child in event.children for each in child.children)]
    return any(each.name in (name, "PythonSubclass") for each in inner)
