"""The page of a dry run: does it fit, where is the peak, what goes over which network, how the pipeline fills."""

from html import escape
from math import prod

from danlu.cost.pipeline import ScheduleError
from danlu.report import wording
from danlu.report.dryrun_memory import memory_figure, peaks, where, whole_size, worst
from danlu.report.dryrun_operators import operator_tables, phase_flops
from danlu.report.dryrun_schedule import Timed, schedule_figure, time_schedule
from danlu.report.dryrun_traffic import sent, traffic_figure
from danlu.report.frame import MARK, document, facts_list, footer, tile_row
from danlu.spec.trace import DryRun, Trace

_AXES = {
    "pp": "{} pipeline places",
    "replicate": "{} copies of the model",
    "shard": "states sharded over {}",
    "cp": "every sequence shared by {}",
    "tp": "every matrix shared by {}",
    "ep": "experts spread over {}",
}
"""Degrees in words, outermost first."""


def dryrun_page(run: DryRun) -> str:
    """One self-contained page that shows a dry run; write it to a file and open it in a browser."""
    if not run.traces:
        raise ValueError("a dry run must hold the trace of at least one rank, but holds none")
    heaviest = worst(run.traces)
    timed, problem = _timed(run)
    several = f"<h2>Memory of every rank at its peak</h2>{peaks(run.traces, run.memory_limit)}"
    body = [
        _header(run, heaviest),
        _tiles(run, heaviest, timed),
        several if len(run.traces) > 1 else "",
        f"<h2>Pipeline</h2>{schedule_figure(run, timed) if timed else problem}" if run.schedule else "",
        f"<h2>{'Rank by rank' if len(run.traces) > 1 else 'The rank'}</h2>",
        *(_rank(run, trace, is_open=trace is heaviest) for trace in run.traces),
        footer(),
    ]
    return document(f"{run.name}, dry run", "".join(body), styles=("page.css", "dryrun.css"))


def _timed(run: DryRun) -> tuple[Timed | None, str]:
    """The schedule with its times; where there are none, why, as a card of the page."""
    try:
        return time_schedule(run), ""
    except ScheduleError as error:
        words = escape(f"The schedule cannot be drawn: {error}.")
        return None, f'<div class="card"><p class="soft">{words}</p></div>'


def _header(run: DryRun, heaviest: Trace) -> str:
    facts = {
        "ranks": f"{_world(run):,}",
        "layout": layout_words(run.degrees),
        "microbatches": f"{run.microbatches:,}",
        "cluster": run.cluster or wording.MISSING,
    }
    fits = run.memory_limit is None or heaviest.peak.total <= run.memory_limit
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in _gaps(run))
    return (
        f'<header>{MARK}<div class="title"><h1>{escape(run.name)}</h1><span class="state dry">dry run</span></div>'
        f'{facts_list(facts)}<p class="note {"fits" if fits else "failed"}">{escape(verdict(run))}</p>{notes}</header>'
    )


def layout_words(degrees: dict[str, int]) -> str:
    """The degrees that are not 1, in plain words."""
    words = [text.format(f"{degrees[axis]:,}") for axis, text in _AXES.items() if degrees.get(axis, 1) > 1]
    words += [f"{axis} {degree:,}" for axis, degree in degrees.items() if axis not in _AXES and degree > 1]
    return " · ".join(words) or "one rank"


def verdict(run: DryRun) -> str:
    """Whether the run fits its chips, and what makes the peak, in a sentence or two."""
    heaviest = worst(run.traces)
    peak, limit = heaviest.peak, run.memory_limit
    if limit is None:
        words = f"Needs {wording.size(peak.total)} a rank"
    elif peak.total <= limit:
        words = f"Fits: needs {_of(peak.total, limit)}"
    else:
        words = f"Does not fit: needs {_of(peak.total, limit)}, {wording.size(peak.total - limit)} too much"
    during = f", microbatch {peak.microbatch:,}," if peak.microbatch is not None and run.microbatches > 1 else ""
    return f"{words}; the peak is in {where(peak)}{during} on rank {heaviest.rank:,}."


def _of(needed: int, limit: int) -> str:
    """`41.2 of 80 GiB`: the unit once if both have the same."""
    some, all_of_it = wording.size(needed), whole_size(limit)
    number, unit = some.split(" ")
    return f"{number if all_of_it.endswith(unit) else some} of {all_of_it}"


def _gaps(run: DryRun) -> list[str]:
    """What the page cannot speak for."""
    classes = {trace.place.get("pp", 0): trace.stands_for for trace in run.traces}
    missing = _world(run) - sum(classes.values())
    notes = []
    if missing > 0:
        notes.append(
            f"{missing:,} of {_world(run):,} ranks do other work than those that were run, so their peak may be higher."
        )
    folded = [trace for trace in run.traces if trace.folded]
    if folded:
        most = max(trace.folded for trace in folded)
        notes.append(f"Up to {most:,} layers of a rank were counted, not run, because they are like their neighbours.")
    return notes


def _world(run: DryRun) -> int:
    return prod(degree for axis, degree in run.degrees.items() if axis != "ep")


def _tiles(run: DryRun, heaviest: Trace, timed: Timed | None) -> str:
    busiest = max(run.traces, key=lambda trace: trace.flops)
    again = phase_flops(busiest)["recompute"]
    loudest = max(run.traces, key=sent)
    limit = run.memory_limit
    seconds = sum(trace.seconds for trace in run.traces)
    ranks = f"{len(run.traces)} rank{'s' * (len(run.traces) != 1)} run"
    return tile_row(
        [
            (
                "Peak memory",
                wording.size(heaviest.peak.total),
                f"{wording.percent(heaviest.peak.total / limit)} of a chip" if limit else f"rank {heaviest.rank:,}",
            ),
            (
                "Work a step",
                wording.work(busiest.flops),
                f"a rank, {wording.percent(again / busiest.flops)} computed again" if again else "a rank",
            ),
            ("Sent a step", wording.size(sent(loudest)), f"by rank {loudest.rank:,}"),
            (
                "Bubble",
                wording.percent(timed.timeline.bubble if timed else None),
                "of the pipeline's time" if timed else "see below" if run.schedule else "no pipeline",
            ),
            ("Ranks", f"{_world(run):,}", ranks),
            ("Took", wording.duration(seconds), "without the machine"),
        ]
    )


def _rank(run: DryRun, trace: Trace, is_open: bool) -> str:
    """All that one rank does, folded away unless it is the one that needs most."""
    place = f"place {trace.place['pp']} of the pipeline" if run.degrees.get("pp", 1) > 1 and "pp" in trace.place else ""
    alike = f"stands for {trace.stands_for:,} ranks" if trace.stands_for > 1 else ""
    words = " · ".join(word for word in (place, alike) if word)
    figures = f"{wording.size(trace.peak.total)} · {wording.work(trace.flops)} · {wording.size(sent(trace))} sent"
    steps = trace.memory[-1].at if trace.memory else trace.peak.at
    return (
        f'<details class="card rank"{" open" if is_open else ""}><summary>Rank {trace.rank:,}<small>{escape(words)}'
        f"</small><small>{figures}</small></summary>"
        f'<section><div class="head"><h3>Memory over the step</h3><small>{steps:,} operators from left to right'
        f"</small></div>{memory_figure(trace, run.memory_limit)}</section>"
        f'<section><div class="head"><h3>Bytes by network level and axis</h3>'
        f"<small>sent in a step, levels innermost first</small></div>{traffic_figure(trace, run.levels)}</section>"
        f"<section><h3>Heaviest operators</h3>{operator_tables(trace)}</section></details>"
    )
