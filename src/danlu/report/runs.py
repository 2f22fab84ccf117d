"""All runs of a folder at a glance, and one run in a few figures."""

import time
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from danlu.report import wording
from danlu.report.saving import samples_words, short, tensors_words
from danlu.report.story import State, Story, read_story
from danlu.spec import Recipe, RunFolder, SpecError, Started, load_recipe
from danlu.spec.problem import nearest, problem_at

SPARKS = 12
"""Pieces of the loss curve a summary keeps."""

WIDE = 110
"""Characters from which the table of runs shows every column."""

_STATE_STYLE: dict[State, str] = {
    "finished": "green",
    "failed": "red",
    "stopped": "yellow",
    "unfinished": "cyan",
    "not started": "dim",
}


@dataclass(frozen=True, kw_only=True)
class DataShare:
    """One data set of a mixture, and its share of the samples."""

    shards: str
    weight: float
    share: float


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run in a few figures; what its events do not tell is None."""

    name: str
    path: str
    state: State
    model: str | None
    parameters: int | None
    world: int | None
    chip: str | None
    step: int
    steps: int | None
    loss: float | None
    baseline_loss: float | None
    loss_curve: str
    """The loss so far in a few characters."""
    tokens: int
    tokens_per_second: float | None
    mfu: float | None
    peak_source: str | None
    memory: int | None
    started: float | None
    """Of the first start, in seconds since the epoch."""
    last_event: float | None
    seconds: float
    skipped_steps: int
    lost_steps: int
    warnings: int
    mixture: tuple[DataShare, ...]
    """The data sets the recipe mixes; empty where it names one."""
    message: str
    """What the run said when it ended, or why a part of it could not be read."""


def is_run(path: Path) -> bool:
    """Whether a folder holds a run: what was asked, or what happened."""
    run = RunFolder(path)
    return run.events.exists() or run.recipe.exists()


def list_runs(folder: Path) -> list[RunSummary]:
    """Every run under `folder`, the newest first; runs without an event come last."""
    if not folder.is_dir():
        hint = "give the folder that holds the runs with --folder"
        raise SpecError([problem_at(folder, 1, "runs", "is not a folder", hint)])
    summaries = [summarise(RunFolder(path)) for path in sorted(folder.iterdir()) if path.is_dir() and is_run(path)]
    return sorted(summaries, key=lambda summary: -(summary.started or 0))


def find_run(name: str, folder: Path) -> RunFolder:
    """The run called `name` in `folder`, or the run folder at that path; a wrong name is answered with the nearest."""
    for path in (folder / name, Path(name)):
        if path.is_dir() and is_run(path):
            return RunFolder(path)
    names = [path.name for path in folder.iterdir() if is_run(path)] if folder.is_dir() else []
    hint = nearest(name, names) if names else f"there are no runs in {folder}; give their folder with --folder"
    raise SpecError([problem_at(folder, 1, "run", f'"{name}" is not a run', hint)])


def summarise(run: RunFolder) -> RunSummary:
    """Read one run."""
    story = read_story(run)
    start = story.start
    recipe, trouble = _recipe(run)
    unreadable = [f"{len(story.problems)} unreadable lines in {run.events.name}"] if story.problems else []
    return RunSummary(
        name=run.name,
        path=str(run.path),
        state=story.state,
        model=recipe.model.name if recipe else None,
        parameters=start.parameters if start else None,
        world=start.world if start else None,
        chip=start.chip if start else None,
        step=story.step,
        steps=start.steps if start else None,
        loss=story.loss,
        baseline_loss=story.baseline_loss,
        loss_curve=wording.sparkline([step.loss for step in story.steps if isfinite(step.loss)], SPARKS),
        tokens=story.tokens,
        tokens_per_second=story.tokens_per_second,
        mfu=story.mfu,
        peak_source=start.peak_source if start else None,
        memory=story.memory,
        started=story.starts[0].time if start else None,
        last_event=story.last_event,
        seconds=story.seconds,
        skipped_steps=len(story.skipped),
        lost_steps=story.lost_steps,
        warnings=len(story.warnings),
        mixture=_mixture(recipe),
        message="; ".join([*([story.end.message] if story.end and story.end.message else []), *trouble, *unreadable]),
    )


def _recipe(run: RunFolder) -> tuple[Recipe | None, list[str]]:
    """The recipe, or why it cannot be read."""
    try:
        return load_recipe(run.recipe), []
    except SpecError as error:
        return None, [str(error).splitlines()[0]]


def _mixture(recipe: Recipe | None) -> tuple[DataShare, ...]:
    sources = recipe.data.sources if recipe else ()
    total = sum(source.weight for source in sources)
    return tuple(
        DataShare(shards=source.shards, weight=source.weight, share=source.weight / total) for source in sources
    )


def _mixture_words(mixture: tuple[DataShare, ...]) -> str:
    """A data set a line: its share, its weight as the recipe gives it, and where it lies."""
    return "\n".join(
        f"{wording.percent(part.share)} (weight {part.weight:g})  {escape(part.shards)}" for part in mixture
    )


def runs_table(summaries: list[RunSummary], *, width: int, now: float | None = None) -> Table:
    """The runs as a table of at most `width` characters; model and start are left out where they do not fit."""
    now = time.time() if now is None else now
    is_wide = width >= WIDE
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", no_wrap=True)
    table.add_column("state", min_width=len("not started"))
    if is_wide:
        table.add_column("model", no_wrap=True)
    for title, justify in (("step", True), ("loss", False), ("tokens/s", True), ("time", True)):
        table.add_column(title, justify="right" if justify else "left", no_wrap=True)
    if is_wide:
        table.add_column("started", no_wrap=True)
    for run in summaries:
        table.add_row(
            f"[bold]{escape(run.name)}[/]",
            _state_words(run, now),
            *([escape(run.model or wording.MISSING)] if is_wide else []),
            f"{run.step:,}/{run.steps:,}" if run.steps is not None else wording.MISSING,
            f"{wording.loss(run.loss)} [yellow]{run.loss_curve}[/]".strip(),
            wording.count(run.tokens_per_second),
            wording.duration(run.seconds) if run.started is not None else wording.MISSING,
            *([_local(run.started)] if is_wide else []),
        )
    return table


def _state_words(run: RunSummary, now: float) -> str:
    """The state; where no end is recorded, how long the run has been silent, for the reader to judge."""
    words = f"[{_STATE_STYLE[run.state]}]{run.state}[/]"
    if run.state == "unfinished" and run.last_event is not None:
        words += f", [dim]last event {wording.duration(max(0.0, now - run.last_event))} ago[/]"
    return words


def _local(moment: float | None) -> str:
    return wording.MISSING if moment is None else datetime.fromtimestamp(moment).astimezone().strftime("%Y-%m-%d %H:%M")


def summary_table(run: RunFolder) -> Table:
    """A run in a small table: how far, how good, how fast, how long, and where its page is."""
    story = read_story(run)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in _summary_rows(run, story):
        table.add_row(name, value)
    return table


def _summary_rows(run: RunFolder, story: Story) -> list[tuple[str, str]]:
    start, paced_by = story.start, story.paced_by
    steps = f"{story.step:,}" + (f" of {start.steps:,}" if start else "")
    if story.skipped:
        steps += f", {len(story.skipped):,} skipped"
    if story.lost_steps:
        steps += f", {story.lost_steps:,} taken again after a restart"
    rows = [
        ("run", f"[bold]{escape(run.name)}[/] [{_STATE_STYLE[story.state]}]{story.state}[/]"),
        ("steps", steps),
        ("loss", _loss_words(story)),
        ("tokens/s", f"{wording.count(story.tokens_per_second)} (median step)"),
        ("MFU", _mfu_words(story.mfu, paced_by)),
        ("memory", f"{wording.size(story.memory)} on the fullest rank"),
        ("tokens", wording.count(story.tokens)),
        ("time", wording.duration(story.seconds)),
    ]
    if mixture := _mixture(_recipe(run)[0]):
        rows.append(("mixture", _mixture_words(mixture)))
    if story.saves:
        rows.append(("saved", _saves_words(story)))
    if story.resumes:
        event = story.resumes[-1]
        rows.append(
            ("resumed", f"from step {event.step:,}: {tensors_words(event)} tensors equal, {samples_words(event)}")
        )
    if story.warnings:
        rows.append(("warnings", f"{len(story.warnings):,}"))
    if story.end and story.end.message:
        rows.append(("message", escape(story.end.message)))
    rows += [("unreadable", escape(str(problem))) for problem in story.problems]
    if run.report.exists():
        rows.append(("page", escape(str(wording.path(run.report)))))
    return rows


def _mfu_words(mfu: float | None, paced_by: Started | None) -> str:
    if paced_by is None:
        return wording.MISSING
    return f"{wording.percent(mfu)} of {wording.flops(paced_by.peak)}, {paced_by.peak_source}"


def _saves_words(story: Story) -> str:
    newest, stalls = max(story.saves), [saved.stall for saved in story.saves.values() if saved.stall is not None]
    waited = f", training waited {short(max(stalls))} at most" if stalls else ""
    return f"{len(story.saves):,} checkpoint{'s' * (len(story.saves) != 1)}, the newest of step {newest:,}{waited}"


def _loss_words(story: Story) -> str:
    words = wording.loss(story.loss)
    if story.loss is not None and story.baseline_loss is not None:
        gap = story.baseline_loss - story.loss
        words += f", {abs(gap):.2f} {'below' if gap > 0 else 'above'} a unigram model ({story.baseline_loss:.2f})"
    return words
