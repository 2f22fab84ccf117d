"""One self-contained page that shows a run: no library, no network, complete without a script."""

from collections.abc import Callable
from html import escape
from math import nan
from pathlib import Path
from typing import TypeVar

from danlu.report import wording
from danlu.report.chart import Curve, Marks, binary_unit, draw
from danlu.report.frame import MARK, document, facts_list, footer, moment, tile_row
from danlu.report.layout import layout
from danlu.report.saving import resumes_card, saves_card
from danlu.report.story import Story, read_story
from danlu.spec import Cluster, Plan, Recipe, RunFolder, SpecError, load_cluster, load_plan, load_recipe

D = TypeVar("D")


def write_page(run: RunFolder) -> Path:
    """Write the run's `report.html` from what its folder holds now, and say where it is."""
    story = read_story(run)
    notes: list[str] = []
    recipe = _read(run.recipe, load_recipe, notes)
    plan = _read(run.plan, load_plan, notes)
    cluster = _read(run.cluster, lambda path: load_cluster(str(path)), notes) if run.cluster.exists() else None
    notes += [str(problem) for problem in story.problems]
    if story.mfu is not None and story.mfu > 1:
        notes.append(
            "MFU is above 100 %, so the peak it is reckoned against is too low: measure it with `danlu probe`."
        )
    text = _page(run, story, recipe, plan, cluster, notes)
    # a browser that reloads while a run goes on must never meet half a page
    unfinished = run.report.with_suffix(".html.part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(run.report)
    return run.report


def _read(path: Path, load: Callable[[Path], D], notes: list[str]) -> D | None:
    """A file of the run folder; what cannot be read is missing from the page, and the page says so."""
    if not path.exists():
        notes.append(f"{path.name} is not in the run folder, so the page does not show what it says.")
        return None
    try:
        return load(path)
    except SpecError as error:
        notes.append(str(error))
        return None


def _page(
    run: RunFolder, story: Story, recipe: Recipe | None, plan: Plan | None, cluster: Cluster | None, notes: list[str]
) -> str:
    body = [
        _header(run, story, recipe),
        _tiles(story, cluster),
        _charts(story),
        f"<h2>Layout</h2>{layout(plan, recipe, cluster)}" if plan else "",
        _warnings(story, notes),
        resumes_card(story),
        saves_card(story),
        _files(run),
        footer(),
    ]
    return document(run.name, "".join(body), styles=("page.css",), scripts=("page.js",))


def _header(run: RunFolder, story: Story, recipe: Recipe | None) -> str:
    start = story.start
    facts = {
        "model": recipe.model.name if recipe else wording.MISSING,
        "parameters": wording.count(start.parameters) if start else wording.MISSING,
        "ranks": f"{start.world:,} × {start.chip}" if start else wording.MISSING,
        "steps": f"{story.step:,} of {start.steps:,}" if start else wording.MISSING,
        "time": wording.duration(story.seconds if start else None),
        "started": moment(story.starts[0].time) if start else wording.MISSING,
    }
    return (
        f'<header>{MARK}<div class="title"><h1>{escape(run.name)}</h1>'
        f'<span class="state {story.state}">{story.state}</span></div>{facts_list(facts)}{_ending(story)}</header>'
    )


def _ending(story: Story) -> str:
    """Why the run is not simply finished, in a sentence."""
    if story.state == "not started":
        words = "No step has been reported yet."
    elif story.state == "unfinished" and story.last_event is not None:
        words = f"No end is recorded: the run goes on, or was killed. Newest event: {moment(story.last_event)}."
    elif story.end and (story.end.message or story.state != "finished"):
        words = f"{story.state.capitalize()} at step {story.end.step:,}" + (
            f": {story.end.message}" if story.end.message else "."
        )
    else:
        return ""
    return f'<p class="note {story.state}">{escape(words)}</p>'


def _peak_words(story: Story) -> str:
    start = story.paced_by
    return f"of {wording.flops(start.peak)}, {start.peak_source}" if start else ""


def _tiles(story: Story, cluster: Cluster | None) -> str:
    start = story.start
    below = ""
    if story.loss is not None and story.baseline_loss is not None:
        gap = story.baseline_loss - story.loss
        below = f"{abs(gap):.2f} {'below' if gap > 0 else 'above'} unigram {story.baseline_loss:.2f}"
    parts = f"in {len(story.starts)} starts" if len(story.starts) > 1 else ""
    if story.lost_steps:
        parts += f", {story.lost_steps:,} steps taken again"
    tiles = [
        ("Final loss" if story.end else "Loss", wording.loss(story.loss), below),
        ("Tokens a second", wording.count(story.tokens_per_second), "median step" if story.last else ""),
        ("MFU", wording.percent(story.mfu), _peak_words(story)),
        (
            "Peak memory",
            wording.size(story.memory),
            f"of {wording.size(cluster.chip.memory)} a chip" if cluster else "",
        ),
        ("Tokens seen", wording.count(story.tokens if story.last else None), _per_parameter(story)),
        ("Time", wording.duration(story.seconds if start else None), parts),
    ]
    return tile_row(tiles)


def _per_parameter(story: Story) -> str:
    if not story.start or not story.start.parameters or not story.tokens:
        return ""
    return f"{wording.count(story.tokens / story.start.parameters)} per parameter"


def _charts(story: Story) -> str:
    steps = story.steps
    if not steps:
        return ""
    across = (steps[0].step - 1, steps[-1].step)
    marks = Marks(saved=sorted(story.saves), resumed=story.resumed, skipped=story.skipped)
    figures = [
        draw(
            curve,
            marks,
            across,
            height=300 if curve.name == "loss" else 170,
            columns=1000 if curve.name == "loss" else 500,
        )
        for curve in _curves(story)
    ]
    return f'<h2>Curves</h2><div class="charts">{"".join(figures)}</div>{_key(marks)}'


def _curves(story: Story) -> list[Curve]:
    steps = story.steps
    unigram = (story.baseline_loss, "unigram") if story.baseline_loss is not None else None
    curves = [
        Curve(
            name="loss",
            title="Loss",
            points=[(s.step, s.loss) for s in steps],
            text=wording.loss,
            row_text=wording.figure,
            smooth=True,
            log_from=3,
            reference=unigram,
        ),
        Curve(
            name="speed",
            title="Tokens a second",
            points=[(s.step, s.tokens / s.seconds if s.seconds > 0 else nan) for s in steps],
            text=wording.count,
            smooth=True,
            floor=0,
        ),
        Curve(
            name="norm",
            title="Gradient norm",
            points=[(s.step, s.norm) for s in steps],
            text=wording.figure,
            note="before clipping",
            smooth=True,
            log_from=20,
        ),
        Curve(
            name="rate",
            title="Learning rate",
            points=[(s.step, s.learning_rate) for s in steps],
            text=wording.rate,
            floor=0,
        ),
        Curve(
            name="memory",
            title="Memory",
            points=[(s.step, s.memory) for s in steps],
            text=wording.size,
            row_text=lambda value: wording.size(value).replace(".0 ", " "),
            unit=binary_unit(story.memory or 0),
            note="largest of any rank so far",
            floor=0,
        ),
    ]
    loads = [(s.step, s.imbalance) for s in steps if s.imbalance is not None]
    if loads:
        curves.append(
            Curve(
                name="balance",
                title="Expert imbalance",
                points=loads,
                text=wording.figure,
                note="busiest expert over the mean",
                smooth=True,
                floor=1,
            )
        )
    return curves


def _key(marks: Marks) -> str:
    """What the marks in the charts mean; only those that occur."""
    words = [
        ("saved", f"{len(marks.saved):,} checkpoint{'s' * (len(marks.saved) != 1)}", marks.saved),
        ("resumed", f"resumed {len(marks.resumed):,} time{'s' * (len(marks.resumed) != 1)}", marks.resumed),
        ("skipped", f"{len(marks.skipped):,} update{'s' * (len(marks.skipped) != 1)} skipped", marks.skipped),
    ]
    shown = "".join(f'<span><i class="{name}"></i>{text}</span>' for name, text, some in words if some)
    return f'<p class="key soft">{shown}</p>' if shown else ""


def _warnings(story: Story, notes: list[str]) -> str:
    items = [f"<li>{escape(note)}</li>" for note in notes]
    repeated: dict[tuple[str, int], int] = {}
    for warned in story.warnings:
        key = (warned.message, warned.rank)
        repeated[key] = repeated.get(key, 0) + 1
    for (message, rank), times in repeated.items():
        often = f" · {times:,} times" if times > 1 else ""
        items.append(f"<li>{escape(message)} <small>rank {rank}{often}</small></li>")
    return f'<h2>Warnings</h2><div class="card"><ul class="warnings">{"".join(items)}</ul></div>' if items else ""


def _files(run: RunFolder) -> str:
    """The run's own files as text, folded away."""
    return "".join(
        f'<details class="card"><summary>{title}<small>{path.name}</small></summary>'
        f"<pre>{escape(path.read_text(encoding='utf-8', errors='replace'))}</pre></details>"
        for title, path in (("Recipe", run.recipe), ("Plan", run.plan), ("Cluster", run.cluster))
        if path.exists()
    )
