"""Search results as tables and as JSON."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from danlu.cost.software import ALL_AT_ONCE
from danlu.planner.explain import COMMUNICATION_PARTS, PART_LABELS, LevelCost, Rejection, bottleneck
from danlu.planner.goodput import Goodput
from danlu.planner.pricing import PricedPlan
from danlu.planner.search import SearchResult
from danlu.report.formatting import MISSING, count, duration, percent
from danlu.report.plan_confidence import (
    band_json,
    band_text,
    fit_chance_text,
    fit_text,
    row_labels,
    shown_plans,
    step_text,
    tie_json,
    tie_text,
)
from danlu.report.plan_missing import missing_json, missing_table
from danlu.report.precision_text import describe_question, slow_precision_note
from danlu.spec.plan import DENSE_AXES, Plan, PlanPrediction
from danlu.version import __version__

PREDICTED_MEMORY = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
"""The kinds of memory of a prediction that are shown."""


def plan_with_prediction(priced: PricedPlan, goodput: Goodput | None) -> Plan:
    """The plan, with its prediction."""
    prediction = PlanPrediction(
        seconds=priced.seconds,
        tokens_per_second=priced.tokens_per_second,
        bytes=round(priced.peak_bytes),
        model_flops_share=priced.mfu,
        dtype=priced.request.matmul_dtype,
        effective_share=goodput.share if goodput else None,
        cluster=priced.request.cluster.name,
        by=f"danlu plan {__version__}",
    )
    return priced.plan.model_copy(update={"prediction": prediction})


def degrees_text(priced: PricedPlan) -> str:
    """Degrees above 1 in one line, which `cp` is a ring, and how tokens reach the experts of `ep`, which comes last."""
    degrees = priced.candidate.degrees
    shown = [f"{axis} {getattr(degrees, axis)}" for axis in (*DENSE_AXES, "ep") if getattr(degrees, axis) > 1]
    text = " × ".join(shown) or "1 rank"
    text = text.replace("cp ", "ring cp ") if priced.candidate.shape.ring else text
    dispatch = priced.candidate.schedule.dispatch
    return f"{text} {dispatch.words}" if dispatch != ALL_AT_ONCE else text


def schedule_text(priced: PricedPlan) -> str:
    """Schedule and stages per rank; layers of the first, the fullest and the last stage if they are not even."""
    shape, schedule, _ = priced.candidate
    if shape.pp == 1:
        return MISSING
    text = schedule.schedule if schedule.stages_per_rank == 1 else f"{schedule.schedule} ×{schedule.stages_per_rank}"
    layers = schedule.stage_layers
    return f"{text} ({layers[0]}…{max(layers)}…{layers[-1]})" if layers else text


def format_gb(value: float) -> str:
    """Memory of a chip, in the decimal units of its data sheet."""
    return f"{value / 1e9:.1f} GB"


def comparison_cells(priced: PricedPlan, goodput: Goodput | None) -> dict[str, str]:
    """What layouts are compared by, as text."""
    shape, schedule, data = priced.candidate
    return {
        "layout": degrees_text(priced),
        "schedule": schedule_text(priced),
        "microbatch": f"{priced.microbatch_size} × {shape.microbatches}",
        "recompute": f"{schedule.recompute}{', regather' if schedule.regather_inputs else ''}"
        + (", compiled" if schedule.compile else ""),
        "reshard": str(data.reshard_after_forward).lower(),  # as `--fix reshard` has it
        "step": step_text(priced.seconds),
        "tokens/s": count(priced.tokens_per_second),
        "MFU": percent(priced.mfu),
        "goodput": count(priced.tokens_per_second * goodput.share if goodput else None),
        "memory": format_gb(priced.peak_bytes),
        "chance to fit": fit_chance_text(priced.fit_chance),
        "bottleneck": bottleneck(priced),
    }


def side_by_side(plans: list[tuple[str, PricedPlan]], goodput: Goodput | None) -> Table:
    """Layouts side by side, one per row."""
    table = Table(title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "layout", "schedule", "microbatch", "recompute", "reshard"):
        table.add_column(name, no_wrap=True)
    for name in ("step", "tokens/s", "MFU", "goodput", "peak memory", "chance to fit", "bottleneck"):
        table.add_column(name, no_wrap=True, justify="left" if name == "bottleneck" else "right")
    for index, (name, priced) in enumerate(plans):
        table.add_row(Text(name), *comparison_cells(priced, goodput).values(), style="" if index else "bold")
    return table


def where_time_goes(priced: PricedPlan, found: list[LevelCost]) -> Table:
    """Parts of a step, with the cost of each network level."""
    levels = [level.name for level in priced.request.cluster.levels]
    table = Table(title="Where the time goes", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("part", no_wrap=True)
    for name in ("seconds", "share", *(f"{level} (s)" for level in levels)):
        table.add_column(name, justify="right", no_wrap=True)
    by_level = {level_cost.level: level_cost for level_cost in found}
    for name, words in PART_LABELS.items():
        seconds = priced.prediction.parts.get(name, 0.0)
        if seconds < 1e-4 * priced.seconds:
            continue
        costs = [by_level[level].parts.get(name, 0.0) if name in COMMUNICATION_PARTS else 0.0 for level in levels]
        cells = [f"{cost:.3f}" if cost >= 0.005 * seconds else "" for cost in costs]
        table.add_row(words, f"{seconds:.3f}", percent(seconds / priced.seconds), *cells)
    totals = [f"{by_level[level].seconds:.3f}" for level in levels]
    table.add_row("all", f"{priced.seconds:.3f}", "", *totals, style="bold")
    return table


def where_bytes_go(priced: PricedPlan) -> Text:
    """Memory of the fullest chip in one line."""
    memory, request = priced.prediction.memory, priced.request
    sizes = {kind: getattr(memory, kind) for kind in PREDICTED_MEMORY}
    shown = [f"{kind} {size / 1e9:.1f}" for kind, size in sizes.items() if size >= 5e7]
    rest = memory.device_bytes - memory.allocated
    return Text(
        f"Fullest chip: {format_gb(memory.device_bytes)} of {format_gb(request.cluster.chip.memory)} "
        f"({percent(request.reserve)} kept free): {', '.join(shown)}, context, channels and slack {rest / 1e9:.1f}."
    )


def placement_text(priced: PricedPlan) -> str:
    """Placement of the axes on the network levels."""
    if not priced.placement.mapping:
        return "Default placement, innermost first: tp, cp, shard, replicate, pp."
    words = [
        f"{axis} on " + " × ".join(f"{level} {factor}" for level, factor in factors)
        for axis, factors in priced.placement.mapping
    ]
    return f"Placed: {'; '.join(words)}."


def rejections_table(found: list[Rejection]) -> Table:
    """Why the neighbors were not chosen."""
    table = Table(title="Why not", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("change", "rejected because", "fix, or what costs the time"):
        table.add_column(name, no_wrap=name == "change")
    for rejection in found:
        # As text: a rule may name a table such as [model.moe], which is no markup.
        table.add_row(Text(rejection.change), Text(rejection.reason), Text(rejection.remedy))
    return table


def goodput_text(priced: PricedPlan, goodput: Goodput | None) -> Text:
    """Checkpoint interval and goodput in one sentence."""
    if goodput is None:
        return Text(f'No goodput: the cluster "{priced.request.cluster.name}" has no [[tiers]] or no [failures].')
    effective = priced.tokens_per_second * goodput.share
    return Text(
        f"A failure every {duration(goodput.between_failures)}: save to {goodput.tier} every "
        f"{goodput.steps_between_saves(priced.seconds):,} steps ({duration(goodput.period)}; a save takes "
        f"{duration(goodput.save)}, a recovery {duration(goodput.recover)}); "
        f"goodput {percent(goodput.share)}, {count(effective)} tokens/s."
    )


def with_header(priced: PricedPlan, *views: RenderableType) -> RenderableType:
    """Views under a line with the request and its precision, and a warning if that is slow."""
    return Group(Text(describe_question(priced.request)), *precision_warnings(priced), Text(), *views)


def precision_warnings(priced: PricedPlan) -> list[Text]:
    """A warning where the chip is far faster in another precision."""
    note = precision_note(priced)
    return [Text(f"warning: {note}.", "yellow")] if note else []


def precision_note(priced: PricedPlan) -> str:
    """What a layout loses by the precision of its recipe; empty if little or nothing."""
    return slow_precision_note(priced.request.recipe, priced.plan, priced.request.cluster)


def result_view(
    result: SearchResult, found: list[LevelCost], rejections: list[Rejection], goodput: Goodput | None
) -> RenderableType:
    """A search result for the terminal."""
    best = result.answer
    head = Text(
        f"{describe_question(result.request)}: the best of {result.layouts_searched:,} layouts, "
        f"{result.priced:,} priced in full, {result.seconds:.1f} s"
    )
    rows = list(zip(row_labels(result), shown_plans(result), strict=True))
    notes = [Text(f"Assumed: {note}.") for note in best.prediction.assumptions]
    return Group(
        head,
        *precision_warnings(best),
        Text(),
        side_by_side(rows, goodput),
        Text(),
        Text(tie_text(result)),
        Text(band_text(best)),
        Text(placement_text(best)),
        where_bytes_go(best),
        Text(fit_text(best)),
        goodput_text(best, goodput),
        *notes,
        Text(),
        where_time_goes(best, found),
        Text(),
        rejections_table(rejections),
        Text(),
        missing_table(best),
    )


def plan_json(priced: PricedPlan, goodput: Goodput | None) -> dict[str, Any]:
    """A layout as JSON."""
    memory = priced.prediction.memory
    return {
        "plan": plan_with_prediction(priced, goodput).model_dump(mode="json", exclude_none=True),
        "dtype": priced.request.matmul_dtype,
        "peak": priced.request.peak,
        "seconds": priced.seconds,
        "seconds_band": band_json(priced),
        "tokens_per_second": priced.tokens_per_second,
        "mfu": priced.mfu,
        "effective_tokens_per_second": priced.tokens_per_second * goodput.share if goodput else None,
        "microbatch": priced.microbatch_size,
        "bytes": priced.peak_bytes,
        "fits": priced.fits,
        "fit_chance": priced.fit_chance,
        "held_back_by": bottleneck(priced),
        "parts": priced.prediction.parts,
        "memory": {kind: getattr(memory, kind) for kind in PREDICTED_MEMORY},
    }


def result_json(
    result: SearchResult, found: list[LevelCost], rejections: list[Rejection], goodput: Goodput | None
) -> dict[str, Any]:
    """A search result as JSON."""
    return {
        "chips": result.request.chips,
        "warnings": [note] if result.best and (note := precision_note(result.answer)) else [],
        "layouts": result.layouts_searched,
        "priced": result.priced,
        "search_seconds": result.seconds,
        "best": [plan_json(priced, goodput) for priced in result.ranked],
        "tie": tie_json(result) if result.best else None,
        "levels": [
            {"level": level_cost.level, "seconds": level_cost.seconds, "parts": level_cost.parts}
            for level_cost in found
        ],
        "refused": [vars(rejection) for rejection in rejections],
        "missing": missing_json(result.answer) if result.best else [],
        "goodput": vars(goodput) if goodput else None,
        "leanest": plan_json(result.least_memory, goodput) if result.least_memory else None,
    }
