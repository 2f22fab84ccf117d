"""The page of a search result: axes on the network, time and memory, pipeline schedule, scaling."""

from collections.abc import Sequence
from html import escape

from danlu.cost.pipeline_schedules import pipeline_actions
from danlu.cost.pipeline_simulator import ACTION_KINDS, simulate
from danlu.planner.error_band import error_band
from danlu.planner.explain import COMMUNICATION_PARTS, PART_LABELS, LevelCost, Rejection, bottleneck
from danlu.planner.goodput import Goodput
from danlu.planner.pricing import PricedPlan
from danlu.planner.search import SearchResult
from danlu.report import formatting
from danlu.report.chart import (
    BarSegment,
    ChartMarkers,
    ChartSeries,
    render_bar_row,
    render_chart,
    render_swatches,
)
from danlu.report.dryrun_schedule import TimedSchedule, schedule_figure, usual_durations
from danlu.report.layout_section import layout_section
from danlu.report.page_template import LOGO, facts_list, figures_table, page_footer, prose, render_document, tile_row
from danlu.report.plan_confidence import (
    band_text,
    band_words,
    fit_chance_text,
    fit_text,
    row_labels,
    shown_plans,
    step_text,
    tie_text,
)
from danlu.report.plan_missing import missing_section
from danlu.report.plan_tables import (
    PREDICTED_MEMORY,
    comparison_cells,
    degrees_text,
    format_gb,
    goodput_text,
    placement_text,
    precision_note,
)
from danlu.report.precision_text import format_question_peak
from danlu.spec.plan import SPLIT_BACKWARD_SCHEDULES

_TONES = {"logits": "communication", "buffers": "gathered"}
"""Kinds of memory that have the color of another one in a dry run."""
ScalingPoints = Sequence[tuple[int, PricedPlan | None]]
"""The best layouts for several numbers of chips."""
MAX_BOXES = 4096
"""Actions of a schedule that are drawn; a larger one would make the page slow."""


def plan_page(
    result: SearchResult,
    found: list[LevelCost],
    rejections: list[Rejection],
    goodput: Goodput | None,
    scaling: ScalingPoints = (),
) -> str:
    """One self-contained HTML page for a search result."""
    best, request, plans = result.answer, result.request, shown_plans(result)
    body = [
        _header(result),
        _tiles(best, goodput),
        f'<p class="note">{prose(tie_text(result))}</p><p class="note">{prose(band_text(best))}</p>',
        f'<p class="note">{prose(fit_text(best))}</p>',
        f'<p class="note">{escape(str(goodput_text(best, goodput)))}</p>',
        f"<h2>Side by side</h2>{_side_by_side(result, goodput)}",
        f"<h2>The machine, level by level</h2>{_levels(best, found)}",
        f"<h2>Where the time goes</h2>{_time(plans)}",
        f"<h2>Memory of the fullest chip</h2>{_memory(plans)}",
        f"<h2>Layout</h2>{layout_section(best.plan, request.recipe, request.cluster)}",
        _schedule(best),
        _scaling(scaling),
        f"<h2>Why not</h2>{_rejections(rejections)}",
        missing_section(best),
        page_footer(),
    ]
    title = f"{request.recipe.name} on {request.cluster.name}"
    return render_document(title, "".join(body), styles=("page.css", "dryrun.css"))


def _header(result: SearchResult) -> str:
    request = result.request
    facts = {
        "model": request.model.name,
        "precision": format_question_peak(request),
        "chips": f"{request.chips:,} of {request.cluster.chips:,}",
        "cluster": request.cluster.name,
        "layouts searched": f"{result.layouts_searched:,}",
        "priced in full": f"{result.priced:,}",
    }
    best = result.answer
    notes = "".join(f'<p class="note">Assumed: {escape(note)}.</p>' for note in best.prediction.assumptions)
    note = precision_note(best)
    slow = f'<p class="note">{escape(note)}.</p>' if note else ""
    return (
        f'<header>{LOGO}<div class="title"><h1>{escape(request.recipe.name)}</h1>'
        f'<span class="state dry">plan</span></div>{facts_list(facts)}'
        f'<p class="note fits">{escape(degrees_text(best))}. {escape(placement_text(best))}</p>'
        f"{slow}{notes}</header>"
    )


def _tiles(best: PricedPlan, goodput: Goodput | None) -> str:
    effective = best.tokens_per_second * goodput.share if goodput else None
    spread = band_words(best, error_band(best.request))
    return tile_row(
        [
            ("step", step_text(best.seconds), f"{spread}; bottleneck: {bottleneck(best)}"),
            ("tokens per second", formatting.count(best.tokens_per_second), "without failures"),
            ("MFU", formatting.percent(best.mfu), f"of {format_question_peak(best.request)}"),
            ("goodput", formatting.count(effective), "tokens per second, with failures"),
            (
                "fullest chip",
                format_gb(best.peak_bytes),
                f"of {format_gb(best.request.cluster.chip.memory)}; chance to fit {fit_chance_text(best.fit_chance)}",
            ),
        ]
    )


def _side_by_side(result: SearchResult, goodput: Goodput | None) -> str:
    names = (
        "plan",
        "layout",
        "schedule",
        "microbatch",
        "recompute",
        "step",
        "tokens/s",
        "MFU",
        "memory",
        "chance to fit",
        "bottleneck",
    )
    rows = zip(row_labels(result), shown_plans(result), strict=True)
    every = [{"plan": label} | comparison_cells(priced, goodput) for label, priced in rows]
    return figures_table(names, ([cells[name] for name in names] for cells in every))


def _levels(best: PricedPlan, found: Sequence[LevelCost]) -> str:
    """From the innermost level outwards: its bandwidth, the axes on it, and its cost."""
    cost = {level_cost.level: level_cost for level_cost in found}
    spans = dict(best.placement.group_shapes)
    rows = []
    for index, level in enumerate(best.request.cluster.levels):
        here = [
            f'<span class="phase a-{name.partition("×")[0]}">{name} {spans[name][index]}</span>'
            for name in ("tp", "cp", "shard×cp", "replicate", "ep", "pp")
            if spans[name][index] > 1
        ]
        taper = f", {level.oversubscription:g}:1 oversubscribed" if level.oversubscription > 1 else ""
        level_cost = cost[level.name]
        rows.append(
            f"<tr><td><b>{escape(level.name)}</b><br><small>{level.fanout} × {level.bandwidth / 1e9:g} GB/s per chip"
            f"{taper}</small></td><td>{' '.join(here) or '<span class=soft>nothing</span>'}</td>"
            f'<td class="number">{level_cost.seconds:.3f} s</td><td class="number">'
            f"{formatting.percent(max(0.0, level_cost.seconds) / best.seconds)}</td></tr>"
        )
    head = "<tr><th>level</th><th>group members on it</th><th>cost per step</th><th></th></tr>"
    return f'<div class="card"><table>{head}{"".join(rows)}</table></div>'


def _bars(rows: Sequence[tuple[str, Sequence[BarSegment], float, str]], keys: Sequence[tuple[str, str]]) -> str:
    drawn = "".join(render_bar_row(*row) for row in rows)
    return (
        f'<div class="card"><div class="levels">{drawn}</div><div class="swatches">{render_swatches(keys)}</div></div>'
    )


def _time(plans: Sequence[PricedPlan]) -> str:
    full = max(priced.seconds for priced in plans)
    rows = []
    used: dict[str, str] = {}
    for number, priced in enumerate(plans, start=1):
        parts = []
        for name, words in PART_LABELS.items():
            seconds = priced.prediction.parts.get(name, 0.0)
            if seconds > 1e-3 * priced.seconds:
                tone = f"s-{name}"
                used[tone] = words
                kind = "exposed traffic, " if name in COMMUNICATION_PARTS else ""
                parts.append(BarSegment(tone, seconds, f"{words}: {kind}{seconds:.3f} s"))
        rows.append((f"plan {number}", parts, full, step_text(priced.seconds)))
    return _bars(rows, list(used.items()))


def _memory(plans: Sequence[PricedPlan]) -> str:
    chip = float(plans[0].request.cluster.chip.memory)
    rows = []
    for number, priced in enumerate(plans, start=1):
        memory = priced.prediction.memory
        parts = [
            BarSegment(f"k-{_TONES.get(kind, kind)}", size, f"{kind}: {format_gb(size)}")
            for kind, size in ((kind, getattr(memory, kind)) for kind in PREDICTED_MEMORY)
        ]
        rest = memory.device_bytes - memory.allocated
        parts.append(BarSegment("a-other", rest, f"context, channels, slack: {format_gb(rest)}"))
        rows.append((f"plan {number}", parts, chip, format_gb(priced.peak_bytes)))
    keys = [(f"k-{_TONES.get(kind, kind)}", kind) for kind in PREDICTED_MEMORY]
    return _bars(rows, [*keys, ("a-other", "context, channels, slack")])


def _schedule(best: PricedPlan) -> str:
    """The pipeline schedule, drawn from the order of its actions."""
    shape, schedule, _ = best.candidate
    if shape.pp == 1:
        return ""
    shown = min(
        shape.microbatches,
        max(2 * shape.pp, MAX_BOXES // (2 * shape.pp * schedule.stages_per_rank) // shape.pp * shape.pp),
    )
    order = pipeline_actions(
        schedule.schedule, pp_ranks=shape.pp, microbatches=shown, stages_per_rank=schedule.stages_per_rank
    )
    modes = best.plan.recompute_modes(best.request.model.layers)
    units = usual_durations(modes.count("full") / len(modes))
    durations = {
        (kind, stage): units[kind] for stage in range(shape.pp * schedule.stages_per_rank) for kind in ACTION_KINDS
    }
    halves = f": {units['I']:g} for inputs and 1 for weights" if schedule.schedule in SPLIT_BACKWARD_SCHEDULES else ""
    words = (
        f"Drawn with {shown} of {shape.microbatches} microbatches, equal stages and a backward pass of "
        f"{units['B']:g}{halves}."
    )
    return f"<h2>Pipeline</h2>{schedule_figure(TimedSchedule(simulate(order, durations), words), shown)}"


def _scaling(scaling: ScalingPoints) -> str:
    """Step time by number of chips."""
    points = [(float(chips), priced.seconds) for chips, priced in scaling if priced]
    if len(points) < 2:
        return ""
    curve = ChartSeries(
        name="speed",
        title="Step time by number of chips",
        points=points,
        format_value=step_text,
        note="the fastest layout for each number of chips",
        axis_min=0.0,
    )
    ends = (int(points[0][0]), int(points[-1][0]))
    return f"<h2>More or fewer chips</h2>{render_chart(curve, ChartMarkers(), ends, height=220, columns=500)}"


def _rejections(rejections: Sequence[Rejection]) -> str:
    rows = "".join(
        f'<tr><td class="tight">{escape(one.change)}</td><td>{prose(one.reason)}</td><td>{prose(one.remedy)}</td></tr>'
        for one in rejections
    )
    head = "<tr><th>change</th><th>rejected because</th><th>fix, or what costs the time</th></tr>"
    return f'<div class="card scroll"><table>{head}{rows}</table></div>'
