"""Saves and resumes as text, in tables and on the page."""

from html import escape
from math import prod

from danlu.report import formatting
from danlu.report.page_template import figures_table
from danlu.report.run_history import RunHistory
from danlu.spec import PreflightEvent, ResumeEvent, SaveEvent
from danlu.spec.plan import DENSE_AXES


def format_layout(axes: dict[str, int]) -> str:
    """Axes and the world size, in which expert ranks are not counted again: `shard 2 · tp 2 · ep 2, 4 ranks`."""
    world = prod(degree for axis, degree in axes.items() if axis in DENSE_AXES)
    named = " · ".join(f"{axis} {degree}" for axis, degree in axes.items())
    return f"{named}, {world:,} ranks" if named else "1 rank"


def resume_rows(event: ResumeEvent) -> list[tuple[str, str]]:
    """The verification of a resume, one row per fact."""
    return [
        ("was", format_layout(event.was)),
        ("now", format_layout(event.now)),
        ("tensors", f"{format_tensor_count(event)} equal by fingerprint, {formatting.size(event.bytes)}"),
        ("samples", format_samples(event)),
    ]


def format_tensor_count(event: ResumeEvent) -> str:
    """How many of the saved tensors were verified to be equal."""
    return f"{event.tensors:,} of {event.saved:,}" if event.saved is not None else f"{event.tensors:,}"


def format_samples(event: ResumeEvent) -> str:
    """How many samples were consumed, repeated and skipped."""
    if event.repeated is None or event.skipped is None:
        return f"{event.samples:,} consumed; the run's events do not reach back to the first, so no more is known"
    return f"{event.samples:,} consumed, {event.repeated:,} repeated, {event.skipped:,} skipped"


def format_save_estimate(event: PreflightEvent) -> str:
    """The estimated cost of a save, in one line."""
    text = (
        f"a checkpoint has {formatting.size(event.bytes)} and takes about {format_short_duration(event.seconds)} "
        f"in the background ({formatting.size(event.bandwidth)}/s); "
        f"training waits about {format_short_duration(event.stall)} for it"
    )
    if event.memory:
        text += f"; {formatting.size(event.memory)} of host memory are kept for it"
    if event.free is not None:
        text += f"; {formatting.size(event.free)} are free in the store"
    if event.interval is not None:
        text += f"; at this machine's failure rate save every {formatting.duration(event.interval)}"
    return text


def format_short_duration(seconds: float) -> str:
    """A duration that may be very short."""
    if seconds < 0.0095:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.95 else formatting.duration(seconds)


def format_save(saved: SaveEvent) -> str:
    """The newest save, short enough for the progress line."""
    stall = f", waited {format_short_duration(saved.stall)}" if saved.stall is not None else ""
    return f"saved {saved.step:,} in {format_short_duration(saved.seconds)}{stall}"


def saves_card(history: RunHistory) -> str:
    """The page's table of checkpoints."""
    if not history.saves:
        return ""
    rows = "".join(
        f'<tr><td class="number">{saved.step:,}</td><td class="number">{formatting.duration(saved.seconds)}</td>'
        f'<td class="number">{formatting.MISSING if saved.stall is None else format_short_duration(saved.stall)}</td>'
        f'<td class="wide"><code>{escape(saved.path)}</code></td></tr>'
        for _, saved in sorted(history.saves.items())
    )
    expected = ""
    if history.preflight:
        expected = f'<p class="soft">Before the first step: {escape(format_save_estimate(history.preflight))}.</p>'
    return (
        f'<details class="card"><summary>Checkpoints<small>{len(history.saves):,}</small></summary>{expected}'
        '<table><tr><th class="number">step</th><th class="number">took</th><th class="number">training waited</th>'
        f"<th>where</th></tr>{rows}</table></details>"
    )


def resumes_card(history: RunHistory) -> str:
    """The page's table of resumes: old and new layout, and the verification."""
    if not history.resumes:
        return ""
    rows = "".join(
        f'<tr><td class="number">{event.step:,}</td><td>{escape(format_layout(event.was))}</td>'
        f"<td>{escape(format_layout(event.now))}</td><td>{format_tensor_count(event)}</td>"
        f'<td class="wide">{escape(format_samples(event))}</td></tr>'
        for event in history.resumes
    )
    return (
        f'<details class="card"><summary>Resumes<small>{len(history.resumes):,}</small></summary>'
        '<table><tr><th class="number">step</th><th>was</th><th>now</th><th>tensors equal</th><th>samples</th></tr>'
        f"{rows}</table></details>"
    )


def starts_card(history: RunHistory) -> str:
    """The page's table of starts, if there are several: each with its layout and figures."""
    if len(history.starts) < 2:
        return ""
    rows = []
    for start in history.starts:
        pace = history.stats_of(start)
        cells = (
            f"{start.step:,}",
            format_layout(start.layout) if start.layout else f"{start.world:,} rank{'s' * (start.world != 1)}",
            f"{start.chip}{f' on {start.host}' if start.host else ''}",
            start.dtype or formatting.MISSING,
            f"{pace.steps:,}",
            formatting.count(pace.tokens_per_second),
            f"{formatting.percent(pace.mfu)} of {formatting.flop_rate(start.peak)}",
            formatting.size(pace.memory),
        )
        rows.append(cells)
    names = ("from step", "layout", "machine", "precision", "steps kept", "tokens/s, median", "MFU, median", "memory")
    return f"<h2>Starts</h2>{figures_table(names, rows)}"
