"""A planner's answer in tables and in JSON."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from danlu import __version__
from danlu.planner.explain import PARTS, TRAFFIC, Hold, Refusal, bottleneck
from danlu.planner.goodput import Goodput
from danlu.planner.search import Answer, Choice
from danlu.report.wording import MISSING, count, duration, percent
from danlu.spec.plan import Axis, Plan, Prediction

KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimiser",
    "activations": "activations",
    "logits": "logits",
    "buffers": "buffers",
}
"""Kinds of bytes as the cost model names them, in words."""
_AXES: tuple[Axis, ...] = ("pp", "replicate", "shard", "cp", "tp", "ep")


def planned(choice: Choice, kept: Goodput | None) -> Plan:
    """The plan of a choice, with what was predicted for it."""
    prediction = Prediction(
        seconds=choice.seconds,
        tokens_per_second=choice.tokens_per_second,
        bytes=round(choice.bytes),
        model_flops_share=choice.mfu,
        effective_share=kept.share if kept else None,
        cluster=choice.question.cluster.name,
        by=f"danlu plan {__version__}",
    )
    return choice.plan.model_copy(update={"prediction": prediction})


def degrees_text(choice: Choice) -> str:
    """Degrees above 1 in one line."""
    degrees = choice.candidate.degrees
    shown = [f"{axis} {getattr(degrees, axis)}" for axis in _AXES if getattr(degrees, axis) > 1]
    return " × ".join(shown) or "1 rank"


def schedule_text(choice: Choice) -> str:
    """Schedule and stages a rank; layers of the first, the fullest and the last stage where they are not even."""
    core, work, _ = choice.candidate
    if core.pp == 1:
        return MISSING
    text = work.schedule if work.virtual == 1 else f"{work.schedule} ×{work.virtual}"
    layers = work.layers
    return f"{text} ({layers[0]}…{max(layers)}…{layers[-1]})" if layers else text


def sharding_text(choice: Choice) -> str:
    """Whether parameters are freed between the passes."""
    return "freed" if choice.candidate.split.reshards else "kept"


def gigabytes(value: float) -> str:
    """Bytes of a chip, in the decimal units of its data sheet."""
    return f"{value / 1e9:.1f} GB"


def step_text(seconds: float) -> str:
    """Seconds of a step with three digits that tell."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def side_by_side(choices: list[tuple[str, Choice]], kept: Goodput | None) -> Table:
    """Layouts beside each other, one a row."""
    table = Table(title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "layout", "schedule", "microbatch", "recompute", "gathered"):
        table.add_column(name, no_wrap=True)
    for name in ("step", "tokens/s", "MFU", "goodput", "peak bytes", "held back by"):
        table.add_column(name, no_wrap=True, justify="left" if name == "held back by" else "right")
    for index, (name, choice) in enumerate(choices):
        core = choice.candidate.core
        effective = choice.tokens_per_second * kept.share if kept else None
        table.add_row(
            name,
            degrees_text(choice),
            schedule_text(choice),
            f"{choice.microbatch} × {core.microbatches}",
            choice.candidate.work.recompute,
            sharding_text(choice),
            step_text(choice.seconds),
            count(choice.tokens_per_second),
            percent(choice.mfu),
            count(effective),
            gigabytes(choice.bytes),
            bottleneck(choice),
            style="bold" if index == 0 else "",
        )
    return table


def where_time_goes(choice: Choice, found: list[Hold]) -> Table:
    """Parts of a step, with how much of each every level of the network costs."""
    levels = [level.name for level in choice.question.cluster.levels]
    table = Table(title="Where the time goes", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("part", no_wrap=True)
    for name in ("seconds", "share", *(f"of it {level}" for level in levels)):
        table.add_column(name, justify="right", no_wrap=True)
    by_level = {hold.level: hold for hold in found}
    for name, words in PARTS.items():
        seconds = choice.prediction.parts.get(name, 0.0)
        if seconds < 1e-4 * choice.seconds:
            continue
        cells = [_part(by_level[level].parts.get(name, 0.0), seconds) if name in TRAFFIC else "" for level in levels]
        table.add_row(words, f"{seconds:.3f}", percent(seconds / choice.seconds), *cells)
    totals = [f"{by_level[level].seconds:.3f}" for level in levels]
    table.add_row("all", f"{choice.seconds:.3f}", "", *totals, style="bold")
    return table


def _part(value: float, whole: float) -> str:
    return f"{value:.3f}" if value >= 0.005 * whole else ""


def where_bytes_go(choice: Choice) -> Text:
    """Bytes of the fullest chip in one line."""
    memory, question = choice.prediction.memory, choice.question
    sizes = {words: getattr(memory, kind) for kind, words in KINDS.items()}
    shown = [f"{words} {size / 1e9:.1f}" for words, size in sizes.items() if size >= 5e7]
    rest = memory.device - memory.allocated
    return Text(
        f"Fullest chip: {gigabytes(memory.device)} of {gigabytes(question.cluster.chip.memory)} "
        f"({percent(question.reserve)} kept free): {', '.join(shown)}, context, channels and slack {rest / 1e9:.1f}."
    )


def placing_text(choice: Choice) -> str:
    """Where the axes lie."""
    if not choice.place.mapping:
        return "Axes follow one another from the inside: tp, cp, shard, replicate, pp."
    words = [
        f"{axis} on " + " × ".join(f"{level} {factor}" for level, factor in factors)
        for axis, factors in choice.place.mapping
    ]
    return f"Placed: {'; '.join(words)}."


def refusals_table(found: list[Refusal]) -> Table:
    """What speaks against the neighbours."""
    table = Table(title="Why not", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("change", "refused by", "remedy, or what costs the time"):
        table.add_column(name, no_wrap=name == "change")
    for refusal in found:
        table.add_row(refusal.change, refusal.reason, refusal.remedy)
    return table


def goodput_text(choice: Choice, kept: Goodput | None) -> Text:
    """Checkpoints and failures in one sentence."""
    if kept is None:
        return Text(f'No goodput: the cluster "{choice.question.cluster.name}" names no storage tier or no failures.')
    effective = choice.tokens_per_second * kept.share
    return Text(
        f"A failure every {duration(kept.between_failures)}: save to {kept.tier} every {kept.every(choice.seconds):,} "
        f"steps ({duration(kept.period)}; a save takes {duration(kept.save)}, a recovery {duration(kept.recover)}); "
        f"{percent(kept.share)} of the time counts, {count(effective)} tokens/s."
    )


def answer_view(answer: Answer, found: list[Hold], refused: list[Refusal], kept: Goodput | None) -> RenderableType:
    """All an answer says on a terminal."""
    best = answer.best[0]
    question = answer.question
    head = Text(
        f"{question.model.name} on {question.chips:,} of the {question.cluster.chips:,} chips of "
        f"{question.cluster.name}: the best of {answer.layouts:,} layouts, {answer.priced:,} priced in full, "
        f"{answer.seconds:.1f} s"
    )
    rows = [(str(place), choice) for place, choice in enumerate(answer.best, start=1)]
    notes = [Text(f"Assumed: {note}.") for note in best.prediction.notes]
    return Group(
        head,
        Text(),
        side_by_side(rows, kept),
        Text(),
        Text(placing_text(best)),
        where_bytes_go(best),
        goodput_text(best, kept),
        *notes,
        Text(),
        where_time_goes(best, found),
        Text(),
        refusals_table(refused),
    )


def choice_json(choice: Choice, kept: Goodput | None) -> dict[str, Any]:
    """A layout for machines."""
    memory = choice.prediction.memory
    return {
        "plan": planned(choice, kept).model_dump(mode="json", exclude_none=True),
        "seconds": choice.seconds,
        "tokens_per_second": choice.tokens_per_second,
        "mfu": choice.mfu,
        "effective_tokens_per_second": choice.tokens_per_second * kept.share if kept else None,
        "microbatch": choice.microbatch,
        "bytes": choice.bytes,
        "fits": choice.fits,
        "held_back_by": bottleneck(choice),
        "parts": choice.prediction.parts,
        "memory": {kind: getattr(memory, kind) for kind in KINDS},
    }


def answer_json(answer: Answer, found: list[Hold], refused: list[Refusal], kept: Goodput | None) -> dict[str, Any]:
    """An answer for machines."""
    return {
        "chips": answer.question.chips,
        "layouts": answer.layouts,
        "priced": answer.priced,
        "search_seconds": answer.seconds,
        "best": [choice_json(choice, kept) for choice in answer.best],
        "levels": [{"level": hold.level, "seconds": hold.seconds, "parts": hold.parts} for hold in found],
        "refused": [vars(refusal) for refusal in refused],
        "goodput": vars(kept) if kept else None,
        "leanest": choice_json(answer.leanest, kept) if answer.leanest else None,
    }
