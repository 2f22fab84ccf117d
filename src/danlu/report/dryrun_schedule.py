"""The pipeline schedule of a dry run as SVG: a row per pipeline rank, a box per action, and the idle time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from danlu.cost.pipeline_simulator import (
    ACTION_KINDS,
    ActionKind,
    Durations,
    PipelineTimeline,
    TimedAction,
    parse_action,
    simulate,
)
from danlu.report import formatting
from danlu.report.chart import render_swatches
from danlu.report.dryrun_operators import phase_flops
from danlu.report.layout_svg import elide
from danlu.spec.trace import DryRun, Trace

WIDTH, LEFT, RIGHT, GAP = 1036, 56, 60, 28
"""Widths of the picture, the column left of the boxes, the one right of them, and the cut between start and end."""
MAX_PIPELINE_ROWS = 24
DIGIT, MARGIN = 6, 3
"""Width of a digit, and of the margin a box needs around its number."""
MAX_SHADES = 4
"""Shades for the virtual stages of one pipeline rank; further stages have the last."""
ACTION_LABELS: dict[ActionKind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward for inputs",
    "W": "backward for weights",
}


@dataclass(frozen=True)
class TimedSchedule:
    """A schedule with times, and a note on how they were computed."""

    timeline: PipelineTimeline
    note: str


def time_schedule(run: DryRun) -> TimedSchedule | None:
    """The times of every action, by FLOPs if every pipeline rank was run, else by rule of thumb; None without pp.

    Raises `ScheduleError` if the schedule cannot be run.
    """
    if not run.schedule:
        return None
    durations, note = _durations(run)
    return TimedSchedule(simulate(run.schedule, durations), note)


def _durations(run: DryRun) -> tuple[Durations, str]:
    stages = [sorted({parse_action(text).stage for text in row}) for row in run.schedule]
    by_pp_rank = {trace.place.get("pp", 0): trace for trace in run.traces}
    traces = [by_pp_rank[pp_rank] for pp_rank in range(len(stages)) if pp_rank in by_pp_rank]
    if len(traces) == len(stages) and all(phase_flops(trace)["forward"] for trace in traces):
        durations = {
            (kind, stage): flops / (run.microbatches * len(held))
            for trace, held in zip(traces, stages, strict=True)
            for kind, flops in _by_action(trace).items()
            for stage in held
        }
        shared = ", divided evenly among its stages" if len(stages[0]) > 1 else ""
        return durations, f"Boxes are as wide as the FLOPs of their pipeline rank{shared}: time at equal speed."
    recomputes = any(_recomputes(trace) for trace in run.traces)
    units = usual_durations(recomputes)
    held_units = {(kind, stage): units[kind] for kind in ACTION_KINDS for row in stages for stage in row}
    used = {parse_action(text).kind for row in run.schedule for text in row}
    widths = ", ".join(f"{ACTION_LABELS[kind]} {units[kind]:.0f}" for kind in ACTION_KINDS if kind in used)
    because = "with recompute" if recomputes else "without recompute"
    return held_units, f"Not every pipeline rank was run, so boxes have the usual widths {because}: {widths}."


def usual_durations(recomputed: float) -> dict[ActionKind, float]:
    """Durations of actions by rule of thumb, over that of a forward of which a share is `recomputed`.

    Recompute comes before the half for inputs.
    """
    backward = 2.0 + recomputed
    return {"F": 1.0, "B": backward, "I": backward - 1, "W": 1.0}


def _by_action(trace: Trace) -> dict[ActionKind, float]:
    """FLOPs of a rank's step by action: recompute comes before the half for inputs."""
    flops = phase_flops(trace)
    forward, recompute, backward = flops["forward"], flops["recompute"], flops["backward"]
    return {"F": forward, "B": recompute + backward, "I": recompute + backward / 2, "W": backward / 2}


def _recomputes(trace: Trace) -> bool:
    """Whether most of the forward pass is recomputed; elementwise operators alone take negligible time."""
    flops = phase_flops(trace)
    return flops["recompute"] > flops["forward"] / 2


def schedule_figure(timed: TimedSchedule, microbatches: int) -> str:
    """The card of the schedule: the picture, the idle share, and what the widths mean."""
    timeline = timed.timeline
    windows = _windows(timeline)
    elements: list[str] = []
    y = 4.0
    height = _row_height(len(timeline.actions_by_rank))
    for pp_rank in elide(len(timeline.actions_by_rank), MAX_PIPELINE_ROWS):
        if pp_rank is None:
            elements.append(f'<text class="small" x="{LEFT + 8}" y="{y + 9:.0f}">…</text>')
            y += 14
            continue
        elements += _row(timeline, pp_rank, y, height, windows)
        y += height + (6 if height > 16 else 3)
    if len(windows) > 1:
        elements.append(_cut(windows[0].right, y))
    label = f"Schedule of {len(timeline.actions_by_rank)} pipeline ranks and {microbatches} microbatches"
    bubble = formatting.percent(timeline.bubble_fraction)
    return (
        f'<div class="card"><p>Pipeline ranks idle <b>{bubble}</b> of the time (the bubble). '
        f'<span class="soft">{escape(timed.note)}{_format_cut(timeline, windows)}</span></p>'
        f'<div class="scroll"><svg class="picture schedule" width="{WIDTH}" style="min-width:{WIDTH * 3 // 4}px" '
        f'viewBox="0 0 {WIDTH} {y + 2:.0f}" role="img" aria-label="{label}">{"".join(elements)}</svg></div>'
        f"{_legend(timeline)}</div>"
    )


@dataclass(frozen=True)
class _Window:
    """A span of time and its position in the picture."""

    start: float
    end: float
    left: float
    scale: float

    @property
    def right(self) -> float:
        return self.left + (self.end - self.start) * self.scale

    def x(self, time: float) -> float:
        return self.left + (min(max(time, self.start), self.end) - self.start) * self.scale


def _windows(timeline: PipelineTimeline) -> list[_Window]:
    """The full step, or its start and its end if the full step would be too fine to read."""
    room, total = WIDTH - LEFT - RIGHT, timeline.total or 1.0
    shortest = min(
        (s.end - s.start for row in timeline.actions_by_rank for s in row if s.action.kind == "F"), default=total
    )
    half = (room - GAP) / 2
    legible = DIGIT * len(str(max(s.action.microbatch for row in timeline.actions_by_rank for s in row))) + MARGIN
    scale = min(legible / shortest if shortest else 0.0, half / (_warmup_end(timeline) * 1.15 or total))
    if 2 * half / scale > total * 0.8 if scale else True:
        return [_Window(0.0, total, LEFT, room / total)]
    span = half / scale
    return [_Window(0.0, span, LEFT, scale), _Window(total - span, total, LEFT + half + GAP, scale)]


def _warmup_end(timeline: PipelineTimeline) -> float:
    """The end of the first rank's first backward: the start window must show it, if it is not too long."""
    first = next((timed.end for timed in timeline.actions_by_rank[0] if timed.action.kind in ("B", "I")), 0.0)
    return first if first < timeline.total / 3 else 0.0


def _row_height(pp_ranks: int) -> int:
    return 26 if pp_ranks <= 8 else 20 if pp_ranks <= 16 else 14


def _row(timeline: PipelineTimeline, pp_rank: int, y: float, height: int, windows: Sequence[_Window]) -> Iterator[str]:
    """One pipeline rank: its name, its time, its boxes, its idle share."""
    middle = y + height / 2 + 4
    yield f'<text class="small" x="0" y="{middle:.0f}">pp rank {pp_rank}</text>'
    stages = sorted({timed.action.stage for timed in timeline.actions_by_rank[pp_rank]})
    shades = {stage: shade for shade, stage in enumerate(stages)}
    for window in windows:
        yield (
            f'<rect class="idle" x="{window.left:.1f}" y="{y:.0f}" width="{window.right - window.left:.1f}" '
            f'height="{height}"/>'
        )
        for timed in timeline.actions_by_rank[pp_rank]:
            if timed.end > window.start and timed.start < window.end:
                yield _box(timed, shades[timed.action.stage], window, y, height, timeline.total)
    idle = 1 - timeline.busy[pp_rank] / timeline.total if timeline.total else 0.0
    yield f'<text class="small" x="{WIDTH}" y="{middle:.0f}" text-anchor="end">{idle:.0%} idle</text>'


def _box(timed: TimedAction, shade: int, window: _Window, y: float, height: int, total: float) -> str:
    kind, stage, microbatch = timed.action
    left, right = window.x(timed.start), window.x(timed.end)
    width = right - left
    # A thin gap between boxes that are wide enough.
    gap = 1.0 if width > 4 else 0.0
    title = (
        f"{ACTION_LABELS[kind]} of stage {stage}, microbatch {microbatch}: "
        f"{timed.start / total:.1%} to {timed.end / total:.1%} of the step"
    )
    number = str(microbatch)
    is_complete = window.start <= timed.start and timed.end <= window.end
    text = (
        f'<text x="{(left + right - gap) / 2:.1f}" y="{y + height / 2 + 3.5:.1f}">{number}</text>'
        if is_complete and width >= DIGIT * len(number) + MARGIN and height >= 14
        else ""
    )
    return (
        f'<g><title>{title}</title><rect class="b-{kind} t{min(shade, MAX_SHADES - 1)}" x="{left:.1f}" y="{y:.0f}" '
        f'width="{max(width - gap, 0.3):.1f}" height="{height}"/>{text}</g>'
    )


def _cut(x: float, bottom: float) -> str:
    middle = x + GAP / 2
    return f'<text class="cut" x="{middle:.0f}" y="{bottom / 2 + 6:.0f}" text-anchor="middle">···</text>'


def _format_cut(timeline: PipelineTimeline, windows: Sequence[_Window]) -> str:
    if len(windows) == 1:
        return ""
    shown = (windows[0].end - windows[0].start) / timeline.total
    share = formatting.percent(shown)
    return f" Shown are the first and the last {share} of the step; the middle repeats the same pattern."


def _legend(timeline: PipelineTimeline) -> str:
    """What colors and shades mean; only those that occur."""
    kinds = {timed.action.kind for row in timeline.actions_by_rank for timed in row}
    stages = max(len({timed.action.stage for timed in row}) for row in timeline.actions_by_rank)
    shown = [(f"b-{kind} t0", ACTION_LABELS[kind]) for kind in ACTION_KINDS if kind in kinds]
    key = render_swatches([*shown, ("idle", "idle")])
    if stages > 1:
        shades = "".join(f'<i class="b-F t{shade}"></i>' for shade in range(min(stages, MAX_SHADES)))
        key += f'<span class="shades">{shades}virtual stages, first to last</span>'
    return f'<p class="swatches soft">{key}<span>numbers are microbatches</span></p>'
