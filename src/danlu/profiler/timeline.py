"""The timeline of a profile in the Chrome trace format, which Perfetto opens: a process per rank."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from danlu.profiler.attribution import CalledCollective, StepAttribution
from danlu.profiler.profiler_events import MODULE, RECOMPUTE, STAGE, STEP, WAIT, ProfilerEvent
from danlu.spec.profile import RankProfile

SHORTEST = 2.0
"""Microseconds; operators that take less are left out."""
PHASES, OPERATORS, COLLECTIVES = 0, 1, 2
"""Tracks of a rank; collectives have as many as are under way at once."""

TraceEvent = dict[str, Any]


def rank_timeline(
    rank: int, steps: Sequence[ProfilerEvent], found: Sequence[StepAttribution]
) -> tuple[list[TraceEvent], int]:
    """The events of a rank, from its first step on, and how many operators are left out."""
    writer = _TimelineWriter(rank, steps[0].start)
    for step, attribution in zip(steps, found, strict=True):
        writer.add_step(step, attribution)
    writer.add_collectives([called for attribution in found for called in attribution.collectives])
    return writer.events, writer.dropped


def merge_timelines(profiles: Sequence[RankProfile], about: Mapping[str, object]) -> dict[str, object]:
    """One trace of all profiled ranks; it begins at 0, and says what it leaves out."""
    start = min(profile.started_ns for profile in profiles)
    events: list[TraceEvent] = []
    for profile in profiles:
        events += _track_names(profile)
        later = 1e-3 * (profile.started_ns - start)
        events += [event | {"ts": round(event["ts"] + later, 3)} for event in profile.timeline]
    dropped = sum(profile.dropped_events for profile in profiles)
    note = f"{dropped} operators left out: inside another operator, or shorter than {SHORTEST:g} us"
    return {"displayTimeUnit": "ms", "otherData": {**about, "left out": note}, "traceEvents": events}


class _TimelineWriter:
    def __init__(self, rank: int, start: float) -> None:
        self.events: list[TraceEvent] = []
        self.dropped = 0
        self._rank, self._start = rank, start

    def add_step(self, step: ProfilerEvent, found: StepAttribution) -> None:
        """Its phases, and its modules and operators."""
        self._add(PHASES, f"step {step.name.removeprefix(STEP)}", "phase", step.start, step.end, {})
        for name, start, end in _phases(step):
            self._add(PHASES, name, "phase", start, end, {})
        for child in step.children:
            self._add_operators(child, found)

    def add_collectives(self, called: Iterable[CalledCollective]) -> None:
        """On the first track that is free, from the call to the end of waiting."""
        free_at: list[float] = []
        for each in sorted(called, key=lambda each: each.start):
            track = next((number for number, free in enumerate(free_at) if free <= each.start), len(free_at))
            free_at[track : track + 1] = [each.end]
            call = each.call
            args = {
                "axes": call.axes,
                "bytes": call.payload,
                "ranks": call.ranks,
                "dtype": call.dtype,
                "part": each.part,
                "exposed us": round(each.exposed, 3),
            }
            name = f"{call.operation} {call.axes}"
            self._add(COLLECTIVES + track, name, "collective", each.start, each.end, args)

    def _add_operators(self, event: ProfilerEvent, found: StepAttribution) -> None:
        is_operator = event.is_operator and not event.is_node
        if is_operator and event.duration < SHORTEST:
            self.dropped += 1 + _operators_inside(event)
            return
        if is_operator or event.name == WAIT:
            place = found.places[event]
            args = {"part": found.part_of[event], "phase": place.phase, "module": place.module}
            name = "wait" if event.name == WAIT else event.name.removeprefix("aten::")
            self._add(OPERATORS, name, "operator", event.start, event.end, args)
            self.dropped += _operators_inside(event)
            return
        if name := _annotation_name(event):
            self._add(OPERATORS, name, "module", event.start, event.end, {})
        for child in event.children:
            self._add_operators(child, found)

    def _add(self, track: int, name: str, category: str, start: float, end: float, args: Mapping[str, object]) -> None:
        times = {"ts": round(start - self._start, 3), "dur": round(end - start, 3)}
        event = {"ph": "X", "pid": self._rank, "tid": track, "name": name, "cat": category, **times}
        self.events.append(event | {"args": dict(args)} if args else event)


def _phases(step: ProfilerEvent) -> Iterator[tuple[str, float, float]]:
    """Stages of the loop, and forward, backward and recompute inside the passes."""
    stages = [child for child in step.children if child.name.startswith(STAGE)]
    for stage in stages:
        yield stage.name.removeprefix(STAGE), stage.start, stage.end
        if stage.name == f"{STAGE}passes":
            yield from _passes(stage)
    if stages:
        yield "optimizer", stages[-1].end, step.end


def _passes(stage: ProfilerEvent) -> Iterator[tuple[str, float, float]]:
    """Consecutive modules are a forward pass, consecutive nodes a backward pass."""
    name, start, end = "", 0.0, 0.0
    for child in stage.children:
        kind = "backward" if child.is_node else "forward" if child.name.startswith(MODULE) else ""
        if (kind and kind != name) or child.name == WAIT:
            if name:
                yield name, start, end
            name, start = kind, child.start
        if kind:
            end = child.end
            yield from _recompute(child)
    if name:
        yield name, start, end


def _recompute(event: ProfilerEvent) -> Iterator[tuple[str, float, float]]:
    """Outermost regions that run again."""
    if event.name == RECOMPUTE:
        yield "recompute", event.start, event.end
        return
    for child in event.children:
        yield from _recompute(child)


def _annotation_name(event: ProfilerEvent) -> str:
    if event.name.startswith(MODULE):
        return event.name.removeprefix(MODULE) or "model"
    if event.name == RECOMPUTE:
        return "recompute"
    return event.name if event.name.startswith("FSDP::") else ""


def _operators_inside(event: ProfilerEvent) -> int:
    return sum(each.is_operator for each in event.walk()) - event.is_operator


def _track_names(profile: RankProfile) -> Iterator[TraceEvent]:
    place = ", ".join(f"{axis} {index}" for axis, index in profile.place.items())
    tracks = {event["tid"] for event in profile.timeline}
    names = {PHASES: "phases", OPERATORS: "modules and operators"}

    def named(kind: str, value: object, key: str, track: int = 0) -> TraceEvent:
        return {"ph": "M", "ts": 0, "pid": profile.rank, "tid": track, "name": kind, "args": {key: value}}

    yield named("process_name", f"rank {profile.rank}: {place}", "name")
    yield named("process_labels", f"{profile.host}, pid {profile.pid}", "labels")
    yield named("process_sort_index", profile.rank, "sort_index")
    for track in sorted(tracks):
        number = track - COLLECTIVES + 1
        yield named("thread_name", names.get(track, f"collectives {number}"), "name", track)
        yield named("thread_sort_index", track, "sort_index", track)
