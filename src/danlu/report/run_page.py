"""One self-contained page that shows a run: no library, no network, complete without a script."""

from collections.abc import Callable, Sequence
from html import escape
from math import nan
from pathlib import Path
from typing import TypeVar

from danlu.report import formatting
from danlu.report.chart import ChartMarkers, ChartSeries, byte_unit, render_chart, render_swatches
from danlu.report.checkpoints import resumes_card, saves_card, starts_card
from danlu.report.evaluations import evaluation_series, evaluations_card
from danlu.report.layout_section import layout_section
from danlu.report.page_template import LOGO, facts_list, format_time, page_footer, render_document, tile_row
from danlu.report.precision_text import format_run_precision, format_start_peak
from danlu.report.recoveries import recoveries_card
from danlu.report.run_history import RunHistory, read_run_history
from danlu.report.samples import read_samples, samples_section
from danlu.report.spikes import format_spike, spikes_card
from danlu.spec import Cluster, Plan, Recipe, RunFolder, SpecError, load_cluster, load_plan, load_recipe
from danlu.spec.event import StepEvent
from danlu.spec.files import read_text
from danlu.spec.samples import SampleSet

D = TypeVar("D")


def write_run_page(run: RunFolder) -> Path:
    """Write the run's `report.html` from the current contents of its folder, and return its path."""
    history = read_run_history(run)
    notes: list[str] = []
    recipe = _read(run.recipe, load_recipe, notes)
    plan = _read(run.plan, load_plan, notes)
    cluster = _read(run.cluster, lambda path: load_cluster(str(path)), notes) if run.cluster.exists() else None
    notes += history.unread
    samples, unreadable = read_samples(run)
    notes += unreadable
    if history.mfu is not None and history.mfu > 1:
        notes.append("MFU is above 100 %, so its reference peak is too low: measure the peak with `danlu probe`.")
    text = _page(run, history, recipe, plan, cluster, samples, notes)
    # a browser that reloads while the run continues must never see a partial page
    unfinished = run.report.with_suffix(".html.part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(run.report)
    return run.report


def _read(path: Path, load: Callable[[Path], D], notes: list[str]) -> D | None:
    """A file of the run folder; an unreadable one is missing from the page, with a note."""
    if not path.exists():
        notes.append(f"{path.name} is not in the run folder, so the page does not show it.")
        return None
    try:
        return load(path)
    except SpecError as error:
        notes.append(str(error))
        return None


def _page(
    run: RunFolder,
    history: RunHistory,
    recipe: Recipe | None,
    plan: Plan | None,
    cluster: Cluster | None,
    samples: list[SampleSet],
    notes: list[str],
) -> str:
    body = [
        _header(run, history, recipe),
        _tiles(history, cluster),
        starts_card(history),
        _charts(history),
        evaluations_card(history),
        samples_section(samples),
        f"<h2>Layout</h2>{layout_section(plan, recipe, cluster)}" if plan else "",
        _warnings(history, notes),
        recoveries_card(history.recoveries),
        spikes_card(history.spikes),
        resumes_card(history),
        saves_card(history),
        _files(run),
        page_footer(),
    ]
    return render_document(run.name, "".join(body), styles=("page.css",), scripts=("page.js",))


def _header(run: RunFolder, history: RunHistory, recipe: Recipe | None) -> str:
    start = history.start
    facts = {
        "model": recipe.model.name if recipe else formatting.MISSING,
        "parameters": formatting.count(start.parameters) if start else formatting.MISSING,
        "ranks": f"{start.world:,} × {start.chip}{f' on {start.host}' if start.host else ''}"
        if start
        else formatting.MISSING,
        "precision": format_run_precision(start, recipe) or formatting.MISSING,
        "batch": _format_batch(recipe, history),
        "steps": f"{history.step:,} of {start.steps:,}" if start else formatting.MISSING,
        "time": formatting.duration(history.running_seconds if start else None),
        "started": format_time(history.starts[0].time) if start else formatting.MISSING,
    }
    return (
        f'<header>{LOGO}<div class="title"><h1>{escape(run.name)}</h1>'
        f'<span class="state {history.state}">{history.state}</span></div>'
        f"{facts_list(facts)}{_ending(history)}</header>"
    )


def _format_batch(recipe: Recipe | None, history: RunHistory) -> str:
    """Sequences and their length; only tokens if the recipe is missing or was changed after training."""
    start, batch = history.start, recipe.batch if recipe else None
    if batch and (start is None or batch.tokens == start.tokens_per_step):
        return f"{batch.sequences:,} × {batch.length:,} tokens"
    return f"{start.tokens_per_step:,} tokens" if start else formatting.MISSING


def _ending(history: RunHistory) -> str:
    """Why the run is not simply finished, in a sentence."""
    if history.state == "not started":
        text = "No step has been reported yet."
    elif history.state in ("running", "unfinished") and history.last_event is not None:
        text = f"No end is recorded: still running, or killed. Newest event: {format_time(history.last_event)}."
    elif history.end and (history.end.message or history.state != "finished"):
        text = f"{history.state.capitalize()} at step {history.end.step:,}" + (
            f": {history.end.message}" if history.end.message else "."
        )
    else:
        return ""
    return f'<p class="note {history.state}">{escape(text)}</p>'


def _tiles(history: RunHistory, cluster: Cluster | None) -> str:
    start, paced_by = history.start, history.start_of_last_step
    below = ""
    if history.loss is not None and history.baseline_loss is not None:
        gap = history.baseline_loss - history.loss
        below = f"{abs(gap):.2f} {'below' if gap > 0 else 'above'} unigram {history.baseline_loss:.2f}"
    restarts = len(history.starts) - 1
    time_note = f"after {restarts} restart{'s' * (restarts != 1)}" if restarts > 0 else ""
    if history.lost_steps:
        time_note += f", {history.lost_steps:,} steps repeated"
    if history.rewound_steps:
        left = f"{history.rewound_steps:,} steps undone by rewinds"
        time_note = f"{time_note}, {left}" if time_note else left
    tiles = [
        ("Final loss" if history.end else "Loss", formatting.loss(history.loss), below),
        ("Tokens per second", formatting.count(history.tokens_per_second), _format_median_note(history)),
        ("MFU", formatting.percent(history.mfu), f"of {format_start_peak(paced_by)}" if paced_by else ""),
        (
            "Peak memory",
            formatting.size(history.memory),
            f"of {formatting.size(cluster.chip.memory)} a chip" if cluster else "",
        ),
        ("Tokens seen", formatting.count(history.tokens if history.last_step else None), _per_parameter(history)),
        ("Time", formatting.duration(history.running_seconds if start else None), time_note),
    ]
    return tile_row(tiles)


def _format_median_note(history: RunHistory) -> str:
    if len(history.starts) < 2:
        return "median step" if history.last_step else ""
    return f"median of the newest start's {history.stats_of(history.start_of_last_step).steps:,} steps"


def _per_parameter(history: RunHistory) -> str:
    if not history.start or not history.start.parameters or not history.tokens:
        return ""
    return f"{formatting.count(history.tokens / history.start.parameters)} per parameter"


def _charts(history: RunHistory) -> str:
    steps = history.steps
    if not steps:
        return ""
    across = (steps[0].step - 1, steps[-1].step)
    marks = ChartMarkers(
        saved=sorted(history.saves),
        resumed=history.resume_steps,
        skipped=history.skipped_steps,
        spikes=[(spike.step, format_spike(spike)) for spike in history.spikes],
    )
    figures = [
        render_chart(
            curve,
            marks,
            across,
            height=300 if curve.name == "loss" else 170,
            columns=1000 if curve.name == "loss" else 500,
        )
        for curve in _curves(history)
    ]
    return f'<h2>Curves</h2><div class="charts">{"".join(figures)}</div>{_legend(marks)}'


def _curves(history: RunHistory) -> list[ChartSeries]:
    steps = history.steps
    unigram = (history.baseline_loss, "unigram") if history.baseline_loss is not None else None
    curves = [
        ChartSeries(
            name="loss",
            title="Loss",
            points=[(s.step, s.loss) for s in steps],
            format_value=formatting.loss,
            format_tick=formatting.number,
            smooth=True,
            log_ratio=3,
            reference=unigram,
        ),
        *evaluation_series(history),
        ChartSeries(
            name="speed",
            title="Tokens per second",
            points=[(s.step, s.tokens / s.seconds if s.seconds > 0 else nan) for s in steps],
            format_value=formatting.count,
            smooth=True,
            axis_min=0,
        ),
        ChartSeries(
            name="norm",
            title="Gradient norm",
            points=[(s.step, s.norm) for s in steps],
            format_value=formatting.number,
            note="before clipping",
            smooth=True,
            log_ratio=20,
        ),
        ChartSeries(
            name="rate",
            title="Learning rate",
            points=[(s.step, s.learning_rate) for s in steps],
            format_value=formatting.scientific,
            axis_min=0,
        ),
        ChartSeries(
            name="memory",
            title="Memory",
            points=[(s.step, s.memory) for s in steps],
            format_value=formatting.size,
            format_tick=formatting.round_size,
            tick_unit=byte_unit(history.memory or 0),
            note="largest of any rank so far",
            axis_min=0,
        ),
    ]
    for ahead in range(max((len(s.mtp_losses or ()) for s in steps), default=0)):
        found = [(s.step, s.mtp_losses[ahead]) for s in steps if len(s.mtp_losses or ()) > ahead and s.mtp_losses]
        curves.append(
            ChartSeries(
                name="loss",
                title=f"Loss {ahead + 2} tokens ahead",
                points=found,
                format_value=formatting.number,
                note="multi-token prediction",
                smooth=True,
            )
        )
    exchanges = [(s.step, s.all_to_all_seconds / s.seconds) for s in steps if s.all_to_all_seconds and s.seconds]
    if exchanges:
        curves.append(
            ChartSeries(
                name="exchange",
                title="All-to-all",
                points=exchanges,
                format_value=formatting.percent,
                note="share of the step in which one was under way, mean of all ranks",
                smooth=True,
                axis_min=0,
            )
        )
    curves += _traffic_curves(steps)
    loads = [(s.step, s.imbalance) for s in steps if s.imbalance is not None]
    if loads:
        curves.append(
            ChartSeries(
                name="balance",
                title="Expert imbalance",
                points=loads,
                format_value=formatting.number,
                note="busiest expert over the mean",
                smooth=True,
                axis_min=1,
            )
        )
    return curves


def _traffic_curves(steps: Sequence[StepEvent]) -> list[ChartSeries]:
    """Of the outermost level that anything was sent over: it is the scarcest."""
    used = [level for level, sent in (steps[-1].traffic or {}).items() if sent] if steps else []
    if not used:
        return []
    points = [(s.step, s.traffic[used[-1]]) for s in steps if s.traffic and used[-1] in s.traffic]
    return [
        ChartSeries(
            name="traffic",
            title=f"Traffic over {used[-1]}",
            points=points,
            format_value=formatting.size,
            format_tick=formatting.round_size,
            tick_unit=byte_unit(max(sent for _, sent in points)),
            note="of all ranks, in a step",
            axis_min=0,
        )
    ]


def _legend(marks: ChartMarkers) -> str:
    """What the marks in the charts mean; only those that occur."""
    entries = [
        ("saved", f"{len(marks.saved):,} checkpoint{'s' * (len(marks.saved) != 1)}", marks.saved),
        ("resumed", f"resumed {len(marks.resumed):,} time{'s' * (len(marks.resumed) != 1)}", marks.resumed),
        ("skipped", f"{len(marks.skipped):,} update{'s' * (len(marks.skipped) != 1)} skipped", marks.skipped),
        ("spike", f"{len(marks.spikes):,} spike{'s' * (len(marks.spikes) != 1)}", marks.spikes),
    ]
    shown = render_swatches((name, text) for name, text, some in entries if some)
    return f'<p class="key soft">{shown}</p>' if shown else ""


def _warnings(history: RunHistory, notes: list[str]) -> str:
    items = [f"<li>{escape(note)}</li>" for note in notes]
    repeated: dict[tuple[str, int], int] = {}
    for warned in history.warnings:
        key = (warned.message, warned.rank)
        repeated[key] = repeated.get(key, 0) + 1
    for (message, rank), times in repeated.items():
        often = f" · {times:,} times" if times > 1 else ""
        items.append(f"<li>{escape(message)} <small>rank {rank}{often}</small></li>")
    return f'<h2>Warnings</h2><div class="card"><ul class="warnings">{"".join(items)}</ul></div>' if items else ""


def _files(run: RunFolder) -> str:
    """The run's own files as text, collapsed."""
    return "".join(
        f'<details class="card"><summary>{title}<small>{path.name}</small></summary>'
        f"<pre>{escape(_text(path))}</pre></details>"
        for title, path in (("Recipe", run.recipe), ("Plan", run.plan), ("Cluster", run.cluster))
        if path.exists()
    )


def _text(path: Path) -> str:
    """A file's text, or why it cannot be shown."""
    try:
        return read_text(path)
    except (SpecError, FileNotFoundError) as error:
        return str(error)
