"""The pipeline schedule of a dry run, drawn: a row a place, a box an action, and the time that is lost between them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from danlu.cost.pipeline import (
    ACTION_KINDS,
    ActionKind,
    Durations,
    Slot,
    Timeline,
    parse_action,
    simulate,
)
from danlu.report import wording
from danlu.report.dryrun_operators import phase_flops
from danlu.report.picture import elided
from danlu.spec.trace import DryRun, Trace

WIDTH, LEFT, RIGHT, GAP = 1036, 56, 60, 28
"""Of the picture, of the column before the boxes, of the one behind them, of the cut between beginning and end."""
MOST_PLACES = 24
DIGIT, MARGIN = 6, 3
"""Width of a digit, and of what a box needs beside its number."""
TURNS = 4
"""Shades for the stages of one place; further ones have the last."""
ACTION_WORDS: dict[ActionKind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward for inputs",
    "W": "backward for weights",
}


@dataclass(frozen=True)
class Timed:
    """A schedule with times, and how they were come by."""

    timeline: Timeline
    words: str


def time_schedule(run: DryRun) -> Timed | None:
    """When every action runs, by FLOPs where every place was run, else by rule of thumb; None without a pipeline.

    Raises `ScheduleError` if the schedule cannot be run.
    """
    if not run.schedule:
        return None
    durations, words = _durations(run)
    return Timed(simulate(run.schedule, durations), words)


def _durations(run: DryRun) -> tuple[Durations, str]:
    stages = [sorted({parse_action(text).stage for text in row}) for row in run.schedule]
    by_place = {trace.place.get("pp", 0): trace for trace in run.traces}
    traces = [by_place[place] for place in range(len(stages)) if place in by_place]
    if len(traces) == len(stages) and all(phase_flops(trace)["forward"] for trace in traces):
        durations = {
            (kind, stage): flops / (run.microbatches * len(held))
            for trace, held in zip(traces, stages, strict=True)
            for kind, flops in _by_action(trace).items()
            for stage in held
        }
        shared = ", shared evenly among its stages" if len(stages[0]) > 1 else ""
        return durations, f"Boxes are as wide as the FLOPs of their place{shared}: time at equal speed."
    backward = 3.0 if any(_recomputes(trace) for trace in run.traces) else 2.0
    units: dict[ActionKind, float] = {"F": 1.0, "B": backward, "I": backward - 1, "W": 1.0}
    held_units = {(kind, stage): units[kind] for kind in ACTION_KINDS for row in stages for stage in row}
    used = {parse_action(text).kind for row in run.schedule for text in row}
    told = ", ".join(f"{ACTION_WORDS[kind]} {units[kind]:.0f}" for kind in ACTION_KINDS if kind in used)
    because = "with recompute" if backward == 3 else "without recompute"
    return held_units, f"Not every place was run, so boxes have the usual widths {because}: {told}."


def _by_action(trace: Trace) -> dict[ActionKind, float]:
    """FLOPs of a rank's step by action: what is computed again comes before the half for inputs."""
    flops = phase_flops(trace)
    forward, again, backward = flops["forward"], flops["recompute"], flops["backward"]
    return {"F": forward, "B": again + backward, "I": again + backward / 2, "W": backward / 2}


def _recomputes(trace: Trace) -> bool:
    """Whether the forward pass is computed again, or most of it; what is only elementwise takes no time to speak of."""
    flops = phase_flops(trace)
    return flops["recompute"] > flops["forward"] / 2


def schedule_figure(run: DryRun, timed: Timed) -> str:
    """The card of the schedule: the picture, the share that is idle, and what the widths mean."""
    timeline = timed.timeline
    windows = _windows(timeline)
    parts: list[str] = []
    y = 4.0
    height = _row_height(len(timeline.slots))
    for place in elided(len(timeline.slots), MOST_PLACES):
        if place is None:
            parts.append(f'<text class="small" x="{LEFT + 8}" y="{y + 9:.0f}">…</text>')
            y += 14
            continue
        parts += _row(timeline, place, y, height, windows)
        y += height + (6 if height > 16 else 3)
    if len(windows) > 1:
        parts.append(_cut(windows[0].right, y))
    spoken = f"Schedule of {len(timeline.slots)} places and {run.microbatches} microbatches"
    return (
        f'<div class="card"><p>Places wait <b>{wording.percent(timeline.bubble)}</b> of the time (the bubble). '
        f'<span class="soft">{escape(timed.words)}{_cut_words(timeline, windows)}</span></p>'
        f'<div class="scroll"><svg class="picture schedule" width="{WIDTH}" style="min-width:{WIDTH * 3 // 4}px" '
        f'viewBox="0 0 {WIDTH} {y + 2:.0f}" role="img" aria-label="{spoken}">{"".join(parts)}</svg></div>'
        f"{_key(timeline)}</div>"
    )


@dataclass(frozen=True)
class _Window:
    """A span of time and where it is drawn."""

    start: float
    end: float
    left: float
    scale: float

    @property
    def right(self) -> float:
        return self.left + (self.end - self.start) * self.scale

    def x(self, time: float) -> float:
        return self.left + (min(max(time, self.start), self.end) - self.start) * self.scale


def _windows(timeline: Timeline) -> list[_Window]:
    """The whole step, or its beginning and its end where the whole would be too fine to read."""
    room, total = WIDTH - LEFT - RIGHT, timeline.total or 1.0
    shortest = min((s.end - s.start for row in timeline.slots for s in row if s.action.kind == "F"), default=total)
    half = (room - GAP) / 2
    legible = DIGIT * len(str(max(s.action.microbatch for row in timeline.slots for s in row))) + MARGIN
    scale = min(legible / shortest if shortest else 0.0, half / (_warm_up(timeline) * 1.15 or total))
    if 2 * half / scale > total * 0.8 if scale else True:
        return [_Window(0.0, total, LEFT, room / total)]
    span = half / scale
    return [_Window(0.0, span, LEFT, scale), _Window(total - span, total, LEFT + half + GAP, scale)]


def _warm_up(timeline: Timeline) -> float:
    """Until the first place has its first backward behind it: what the beginning must show, if it is not too long."""
    first = next((slot.end for slot in timeline.slots[0] if slot.action.kind in ("B", "I")), 0.0)
    return first if first < timeline.total / 3 else 0.0


def _row_height(places: int) -> int:
    return 26 if places <= 8 else 20 if places <= 16 else 14


def _row(timeline: Timeline, place: int, y: float, height: int, windows: Sequence[_Window]) -> Iterator[str]:
    """One place: its name, the time it has, its boxes, the share it waits."""
    middle = y + height / 2 + 4
    yield f'<text class="small" x="0" y="{middle:.0f}">place {place}</text>'
    turns = {stage: turn for turn, stage in enumerate(sorted({slot.action.stage for slot in timeline.slots[place]}))}
    for window in windows:
        yield (
            f'<rect class="idle" x="{window.left:.1f}" y="{y:.0f}" width="{window.right - window.left:.1f}" '
            f'height="{height}"/>'
        )
        for slot in timeline.slots[place]:
            if slot.end > window.start and slot.start < window.end:
                yield _box(slot, turns[slot.action.stage], window, y, height, timeline.total)
    idle = 1 - timeline.busy[place] / timeline.total if timeline.total else 0.0
    yield f'<text class="small" x="{WIDTH}" y="{middle:.0f}" text-anchor="end">{idle:.0%} idle</text>'


def _box(slot: Slot, turn: int, window: _Window, y: float, height: int, total: float) -> str:
    kind, stage, microbatch = slot.action
    left, right = window.x(slot.start), window.x(slot.end)
    width = right - left
    # A hair of the ground stays between boxes that can spare it.
    hair = 1.0 if width > 4 else 0.0
    title = (
        f"{ACTION_WORDS[kind]} of stage {stage}, microbatch {microbatch}: "
        f"{slot.start / total:.1%} to {slot.end / total:.1%} of the step"
    )
    number = str(microbatch)
    is_whole = window.start <= slot.start and slot.end <= window.end
    text = (
        f'<text x="{(left + right - hair) / 2:.1f}" y="{y + height / 2 + 3.5:.1f}">{number}</text>'
        if is_whole and width >= DIGIT * len(number) + MARGIN and height >= 14
        else ""
    )
    return (
        f'<g><title>{title}</title><rect class="b-{kind} t{min(turn, TURNS - 1)}" x="{left:.1f}" y="{y:.0f}" '
        f'width="{max(width - hair, 0.3):.1f}" height="{height}"/>{text}</g>'
    )


def _cut(x: float, bottom: float) -> str:
    middle = x + GAP / 2
    return f'<text class="cut" x="{middle:.0f}" y="{bottom / 2 + 6:.0f}" text-anchor="middle">···</text>'


def _cut_words(timeline: Timeline, windows: Sequence[_Window]) -> str:
    if len(windows) == 1:
        return ""
    shown = (windows[0].end - windows[0].start) / timeline.total
    share = wording.percent(shown)
    return f" Drawn are the first and the last {share} of the step; what lies between goes on in the same way."


def _key(timeline: Timeline) -> str:
    """What colours and shades mean; only those that occur."""
    kinds = {slot.action.kind for row in timeline.slots for slot in row}
    turns = max(len({slot.action.stage for slot in row}) for row in timeline.slots)
    key = "".join(
        f'<span><i class="b-{kind} t0"></i>{ACTION_WORDS[kind]}</span>' for kind in ACTION_KINDS if kind in kinds
    )
    key += '<span><i class="idle"></i>idle</span>'
    if turns > 1:
        shades = "".join(f'<i class="b-F t{turn}"></i>' for turn in range(min(turns, TURNS)))
        key += f'<span class="shades">{shades}first to last stage of a place</span>'
    return f'<p class="swatches soft">{key}<span>numbers are microbatches</span></p>'
