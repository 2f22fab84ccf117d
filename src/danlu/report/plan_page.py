"""The page of a planner's answer: the machine with the axes on it, where time and bytes go, schedule, more chips."""

from collections.abc import Sequence
from html import escape

from danlu.cost.pipeline import ACTION_KINDS, ActionKind, simulate
from danlu.cost.schedule import HALVING, actions_of
from danlu.planner.explain import PARTS, TRAFFIC, Hold, Refusal, bottleneck
from danlu.planner.goodput import Goodput
from danlu.planner.search import Answer, Choice
from danlu.report import wording
from danlu.report.chart import Curve, Marks, Part, bar, draw
from danlu.report.dryrun_schedule import Timed, schedule_figure
from danlu.report.frame import MARK, document, facts_list, footer, tile_row
from danlu.report.layout import layout
from danlu.report.plan_tables import (
    KINDS,
    degrees_text,
    gigabytes,
    goodput_text,
    placing_text,
    schedule_text,
    step_text,
)
from danlu.spec.trace import DryRun

_TONES = {
    "linear": "p-forward",
    "attention": "p-forward mixed",
    "elementwise": "k-gathered",
    "head": "k-optimiser",
    "recompute": "p-recompute",
    "tensor": "a-tp",
    "context": "a-cp",
    "expert": "a-ep",
    "gather": "a-shard mixed",
    "gradients": "a-replicate",
    "parameters": "a-replicate",
    "transfer": "a-pp",
    "bubble": "a-pp mixed",
}
"""Classes of the page's style by part of a step; what has none is grey."""
_MEMORY = {
    "parameters": "k-parameters",
    "gradients": "k-gradients",
    "optimizer": "k-optimiser",
    "activations": "k-activations",
    "logits": "k-communication",
    "buffers": "k-gathered",
}
Scaling = Sequence[tuple[int, Choice | None]]
"""The best layouts for several numbers of chips."""
MOST_BOXES = 4096
"""Actions of a schedule that are drawn; a larger one would make the page slow."""


def plan_page(
    answer: Answer, found: list[Hold], refused: list[Refusal], kept: Goodput | None, scaling: Scaling = ()
) -> str:
    """One self-contained page that shows an answer; write it to a file and open it in a browser."""
    best, question = answer.best[0], answer.question
    body = [
        _header(answer),
        _tiles(best, kept),
        f'<p class="note">{escape(str(goodput_text(best, kept)))}</p>',
        f"<h2>Side by side</h2>{_table(answer.best, kept)}",
        f"<h2>The machine, level by level</h2>{_levels(best, found)}",
        f"<h2>Where the time goes</h2>{_time(answer.best)}",
        f"<h2>Bytes of the fullest chip</h2>{_memory(answer.best)}",
        f"<h2>Layout</h2>{layout(best.plan, question.recipe, question.cluster)}",
        _schedule(best),
        _scaling(scaling),
        f"<h2>Why not</h2>{_refusals(refused)}",
        footer(),
    ]
    title = f"{question.recipe.name} on {question.cluster.name}"
    return document(title, "".join(body), styles=("page.css", "dryrun.css"))


def _header(answer: Answer) -> str:
    question = answer.question
    facts = {
        "model": question.model.name,
        "chips": f"{question.chips:,} of {question.cluster.chips:,}",
        "cluster": question.cluster.name,
        "layouts searched": f"{answer.layouts:,}",
        "priced in full": f"{answer.priced:,}",
    }
    notes = "".join(f'<p class="note">Assumed: {escape(note)}.</p>' for note in answer.best[0].prediction.notes)
    return (
        f'<header>{MARK}<div class="title"><h1>{escape(question.recipe.name)}</h1>'
        f'<span class="state dry">plan</span></div>{facts_list(facts)}'
        f'<p class="note fits">{escape(degrees_text(answer.best[0]))}. {escape(placing_text(answer.best[0]))}</p>'
        f"{notes}</header>"
    )


def _tiles(best: Choice, kept: Goodput | None) -> str:
    effective = best.tokens_per_second * kept.share if kept else None
    return tile_row(
        [
            ("step", step_text(best.seconds), f"held back by {bottleneck(best)}"),
            ("tokens a second", wording.count(best.tokens_per_second), "while nothing breaks"),
            ("MFU", wording.percent(best.mfu), f"of {wording.flops(_peak(best))} a chip"),
            ("goodput", wording.count(effective), "tokens a second, failures included"),
            ("fullest chip", gigabytes(best.bytes), f"of {gigabytes(best.question.cluster.chip.memory)}"),
        ]
    )


def _peak(choice: Choice) -> float:
    peak = choice.question.cluster.chip.peak
    return peak.get(choice.question.dtype) or max(peak.values())  # type: ignore[call-overload]


def _table(choices: Sequence[Choice], kept: Goodput | None) -> str:
    names = ("layout", "schedule", "microbatch", "recompute", "step", "tokens/s", "MFU", "bytes", "held back by")
    rows = []
    for choice in choices:
        cells = (
            degrees_text(choice),
            schedule_text(choice),
            f"{choice.microbatch} × {choice.candidate.core.microbatches}",
            choice.candidate.work.recompute,
            step_text(choice.seconds),
            wording.count(choice.tokens_per_second),
            wording.percent(choice.mfu),
            gigabytes(choice.bytes),
            bottleneck(choice),
        )
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f'<div class="card scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _levels(best: Choice, found: Sequence[Hold]) -> str:
    """From the innermost level outwards: how wide it is, which axes lie on it, and what it costs."""
    cost = {hold.level: hold for hold in found}
    spans = dict(best.place.spans)
    axes = {"tp": "tp", "cp": "cp", "shard×cp": "shard×cp", "replicate": "replicate", "ep": "ep", "pp": "pp"}
    rows = []
    for index, level in enumerate(best.question.cluster.levels):
        here = [
            f'<span class="phase a-{name.partition("×")[0]}">{name} {spans[name][index]}</span>'
            for name in axes
            if spans[name][index] > 1
        ]
        taper = f", {level.oversubscription:g}:1 narrower" if level.oversubscription > 1 else ""
        hold = cost[level.name]
        rows.append(
            f"<tr><td><b>{escape(level.name)}</b><br><small>{level.fanout} × {level.bandwidth / 1e9:g} GB/s a chip"
            f"{taper}</small></td><td>{' '.join(here) or '<span class=soft>nothing</span>'}</td>"
            f'<td class="number">{hold.seconds:.3f} s</td><td class="number">'
            f"{wording.percent(max(0.0, hold.seconds) / best.seconds)}</td></tr>"
        )
    head = "<tr><th>level</th><th>members of groups on it</th><th>costs a step</th><th></th></tr>"
    return f'<div class="card"><table>{head}{"".join(rows)}</table></div>'


def _bars(rows: Sequence[tuple[str, Sequence[Part], float, str]], keys: Sequence[tuple[str, str]]) -> str:
    drawn = "".join(
        f'<div class="level"><span>{escape(name)}</span><div class="track">{bar(parts, full)}</div>'
        f"<span>{escape(text)}</span></div>"
        for name, parts, full, text in rows
    )
    swatches = "".join(f'<span><i class="{tone}"></i>{escape(words)}</span>' for words, tone in keys)
    return f'<div class="card"><div class="levels">{drawn}</div><div class="swatches">{swatches}</div></div>'


def _time(choices: Sequence[Choice]) -> str:
    full = max(choice.seconds for choice in choices)
    rows, used = [], {}
    for number, choice in enumerate(choices, start=1):
        parts = []
        for name, words in PARTS.items():
            seconds = choice.prediction.parts.get(name, 0.0)
            if seconds > 1e-3 * choice.seconds:
                tone = _TONES.get(name, "a-other")
                used[words] = tone
                kind = "exposed traffic, " if name in TRAFFIC else ""
                parts.append(Part(tone, seconds, f"{words}: {kind}{seconds:.3f} s"))
        rows.append((f"plan {number}", parts, full, step_text(choice.seconds)))
    return _bars(rows, list(used.items()))


def _memory(choices: Sequence[Choice]) -> str:
    chip = float(choices[0].question.cluster.chip.memory)
    rows = []
    for number, choice in enumerate(choices, start=1):
        memory = choice.prediction.memory
        parts = [
            Part(tone, getattr(memory, kind), f"{KINDS[kind]}: {gigabytes(getattr(memory, kind))}")
            for kind, tone in _MEMORY.items()
        ]
        rest = memory.device - memory.allocated
        parts.append(Part("a-other", rest, f"context, channels, slack: {gigabytes(rest)}"))
        rows.append((f"plan {number}", parts, chip, gigabytes(choice.bytes)))
    keys = [(KINDS[kind], tone) for kind, tone in _MEMORY.items()]
    return _bars(rows, [*keys, ("context, channels, slack", "a-other")])


def _schedule(best: Choice) -> str:
    """The pipeline drawn from the order of its actions."""
    core, work, _ = best.candidate
    if core.pp == 1:
        return ""
    shown = min(core.microbatches, max(2 * core.pp, MOST_BOXES // (2 * core.pp * work.virtual) // core.pp * core.pp))
    order = actions_of(work.schedule, places=core.pp, microbatches=shown, stages_per_place=work.virtual)
    # What is computed again comes before the half for inputs.
    backward = 3.0 if work.recompute == "full" else 2.0
    units: dict[ActionKind, float] = {"F": 1.0, "B": backward, "I": backward - 1, "W": 1.0}
    durations = {(kind, stage): units[kind] for stage in range(core.pp * work.virtual) for kind in ACTION_KINDS}
    halves = f": {units['I']:g} for inputs and 1 for weights" if work.schedule in HALVING else ""
    words = (
        f"Drawn with {shown} of {core.microbatches} microbatches, equal stages and a backward pass of "
        f"{backward:g}{halves}."
    )
    run = DryRun(name="", degrees={}, microbatches=shown, schedule=order, traces=())
    return f"<h2>Pipeline</h2>{schedule_figure(run, Timed(simulate(order, durations), words))}"


def _scaling(scaling: Scaling) -> str:
    """Step time against chips."""
    points = [(float(chips), choice.seconds) for chips, choice in scaling if choice]
    if len(points) < 2:
        return ""
    curve = Curve(
        name="speed",
        title="Step time against chips",
        points=points,
        text=step_text,
        note="the best layout of each number of chips",
        floor=0.0,
    )
    ends = (int(points[0][0]), int(points[-1][0]))
    return f"<h2>More or fewer chips</h2>{draw(curve, Marks(), ends, height=220, columns=500)}"


def _refusals(refused: Sequence[Refusal]) -> str:
    rows = "".join(
        f"<tr><td>{escape(one.change)}</td><td>{escape(one.reason)}</td><td>{escape(one.remedy)}</td></tr>"
        for one in refused
    )
    head = "<tr><th>change</th><th>refused by</th><th>remedy, or what costs the time</th></tr>"
    return f'<div class="card scroll"><table>{head}{rows}</table></div>'
