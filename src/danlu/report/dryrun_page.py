"""The page of a dry run: does it fit, where is the peak, the traffic by network level, the pipeline schedule."""

from html import escape
from math import prod

from danlu.cost.pipeline_simulator import ScheduleError
from danlu.report import formatting
from danlu.report.dryrun_memory import describe_location, max_memory_trace, memory_figure, peak_bars
from danlu.report.dryrun_operators import operator_tables, phase_flops
from danlu.report.dryrun_schedule import TimedSchedule, schedule_figure, time_schedule
from danlu.report.dryrun_traffic import total_payload_bytes, total_wire_bytes, traffic_figure
from danlu.report.page_template import LOGO, facts_list, page_footer, render_document, tile_row
from danlu.spec.trace import DryRun, Trace

_AXES = {
    "pp": "pipeline over {} ranks",
    "replicate": "{} replicas",
    "shard": "states sharded over {}",
    "cp": "context parallel over {}",
    "tp": "tensor parallel over {}",
    "ep": "expert parallel over {}",
}
"""Texts for the degrees, outermost first."""


def dryrun_page(run: DryRun) -> str:
    """One self-contained page that shows a dry run; write it to a file and open it in a browser."""
    if not run.traces:
        raise ValueError("a dry run must have the trace of at least one rank, but has none")
    heaviest = max_memory_trace(run.traces)
    timed, problem = _timed_schedule(run)
    several = f"<h2>Memory of every rank at its peak</h2>{peak_bars(run.traces, run.memory_limit)}"
    body = [
        _header(run, heaviest),
        _tiles(run, heaviest, timed),
        several if len(run.traces) > 1 else "",
        f"<h2>Pipeline</h2>{schedule_figure(timed, run.microbatches) if timed else problem}" if run.schedule else "",
        f"<h2>{'Rank by rank' if len(run.traces) > 1 else 'The rank'}</h2>",
        *(_rank(run, trace, is_open=trace is heaviest) for trace in run.traces),
        page_footer(),
    ]
    return render_document(f"{run.name}, dry run", "".join(body), styles=("page.css", "dryrun.css"))


def _timed_schedule(run: DryRun) -> tuple[TimedSchedule | None, str]:
    """The schedule with its times; if there are none, the reason, as a card of the page."""
    try:
        return time_schedule(run), ""
    except ScheduleError as error:
        reason = escape(f"The schedule cannot be drawn: {error}.")
        return None, f'<div class="card"><p class="soft">{reason}</p></div>'


def _header(run: DryRun, heaviest: Trace) -> str:
    facts = {
        "ranks": f"{_world(run):,}",
        "layout": describe_layout(run.degrees),
        "precision": run.precision or formatting.MISSING,
        "microbatches": f"{run.microbatches:,}",
        "cluster": run.cluster or formatting.MISSING,
    }
    fits = run.memory_limit is None or heaviest.peak.total <= run.memory_limit
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in _caveats(run))
    return (
        f'<header>{LOGO}<div class="title"><h1>{escape(run.name)}</h1><span class="state dry">dry run</span></div>'
        f'{facts_list(facts)}<p class="note {"fits" if fits else "failed"}">{escape(verdict(run))}</p>{notes}</header>'
    )


def describe_layout(degrees: dict[str, int]) -> str:
    """The degrees that are not 1, as text."""
    texts = [text.format(f"{degrees[axis]:,}") for axis, text in _AXES.items() if degrees.get(axis, 1) > 1]
    texts += [f"{axis} {degree:,}" for axis, degree in degrees.items() if axis not in _AXES and degree > 1]
    return " · ".join(texts) or "one rank"


def verdict(run: DryRun) -> str:
    """Whether the run fits its chips, and what causes the peak, in a sentence or two."""
    heaviest = max_memory_trace(run.traces)
    peak, limit = heaviest.peak, run.memory_limit
    if limit is None:
        needs = f"Needs {formatting.size(peak.total)} per rank"
    elif peak.total <= limit:
        needs = f"Fits: needs {_format_of_limit(peak.total, limit)}"
    else:
        needs = f"Does not fit: needs {_format_of_limit(peak.total, limit)}, {formatting.size(peak.total - limit)} over"
    during = f", microbatch {peak.microbatch:,}," if peak.microbatch is not None and run.microbatches > 1 else ""
    return f"{needs}; the peak is in {describe_location(peak)}{during} on rank {heaviest.rank:,}."


def _format_of_limit(needed: int, limit: int) -> str:
    """`41.2 of 80 GB`: the unit once if both have the same."""
    needed_text, limit_text = formatting.size(needed), formatting.round_size(limit)
    number, unit = needed_text.split(" ")
    return f"{number if limit_text.endswith(unit) else needed_text} of {limit_text}"


def _caveats(run: DryRun) -> list[str]:
    """What the page does not cover."""
    classes = {trace.place.get("pp", 0): trace.stands_for for trace in run.traces}
    missing = _world(run) - sum(classes.values())
    notes = []
    if missing > 0:
        notes.append(
            f"{missing:,} of {_world(run):,} ranks do different work from those that were run: their peak may be higher"
        )
    folded = [trace for trace in run.traces if trace.folded]
    if folded:
        most = max(trace.folded for trace in folded)
        notes.append(f"Up to {most:,} identical layers of a rank were extrapolated, not run.")
    return notes


def _world(run: DryRun) -> int:
    return prod(degree for axis, degree in run.degrees.items() if axis != "ep")


def _tiles(run: DryRun, heaviest: Trace, timed: TimedSchedule | None) -> str:
    busiest = max(run.traces, key=lambda trace: trace.flops)
    recomputed = phase_flops(busiest)["recompute"]
    loudest = max(run.traces, key=total_wire_bytes)
    limit = run.memory_limit
    in_precision = f"per rank, in {run.precision}" if run.precision else "per rank"
    seconds = sum(trace.seconds for trace in run.traces)
    ranks = f"{len(run.traces)} rank{'s' * (len(run.traces) != 1)} run"
    return tile_row(
        [
            (
                "Peak memory",
                formatting.size(heaviest.peak.total),
                f"{formatting.percent(heaviest.peak.total / limit)} of a chip" if limit else f"rank {heaviest.rank:,}",
            ),
            (
                "Work per step",
                formatting.flop_count(busiest.flops),
                f"{in_precision}, {formatting.percent(recomputed / busiest.flops)} recomputed"
                if recomputed
                else in_precision,
            ),
            (
                "On the wire per step",
                formatting.size(total_wire_bytes(loudest)),
                f"sent by rank {loudest.rank:,} for a payload of {formatting.size(total_payload_bytes(loudest))}",
            ),
            (
                "Bubble",
                formatting.percent(timed.timeline.bubble_fraction if timed else None),
                "of the pipeline's time" if timed else "see below" if run.schedule else "no pipeline",
            ),
            ("Ranks", f"{_world(run):,}", ranks),
            ("Dry run took", formatting.duration(seconds), "without the cluster"),
        ]
    )


def _rank(run: DryRun, trace: Trace, is_open: bool) -> str:
    """Everything about one rank, collapsed unless it is the one that needs the most memory."""
    pp_rank = f"pp rank {trace.place['pp']}" if run.degrees.get("pp", 1) > 1 and "pp" in trace.place else ""
    represents = f"represents {trace.stands_for:,} ranks" if trace.stands_for > 1 else ""
    notes = " · ".join(note for note in (pp_rank, represents) if note)
    wire = f"{formatting.size(total_wire_bytes(trace))} on the wire"
    figures = f"{formatting.size(trace.peak.total)} · {formatting.flop_count(trace.flops)} · {wire}"
    steps = trace.memory[-1].at if trace.memory else trace.peak.at
    return (
        f'<details class="card rank"{" open" if is_open else ""}><summary>Rank {trace.rank:,}<small>{escape(notes)}'
        f"</small><small>{figures}</small></summary>"
        f'<section><div class="head"><h3>Memory over the step</h3><small>{steps:,} operators from left to right'
        f"</small></div>{memory_figure(trace, run.memory_limit)}</section>"
        f'<section><div class="head"><h3>Bytes by network level and axis</h3>'
        f"<small>sent in a step, levels innermost first</small></div>{traffic_figure(trace, run.levels)}</section>"
        f"<section><h3>Heaviest operators</h3>{operator_tables(trace)}</section></details>"
    )
