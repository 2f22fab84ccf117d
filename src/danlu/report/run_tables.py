"""The table of all runs of a folder, and the summary of one run."""

import os
import time
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from danlu.report import formatting
from danlu.report.checkpoints import format_samples, format_short_duration, format_tensor_count
from danlu.report.evaluations import describe_evaluation
from danlu.report.precision_text import format_run_precision, format_start_peak
from danlu.report.recoveries import format_recovery_totals
from danlu.report.run_history import RunHistory, RunState, read_run_history
from danlu.report.spikes import format_spike_totals
from danlu.spec import Recipe, RunFolder, SpecError, load_recipe
from danlu.spec.problem import problem_at, suggest_name

SPARKLINE_WIDTH = 12
"""Characters of the loss curve in a summary."""

WIDE_TABLE_WIDTH = 110
"""Width in characters from which the table of runs shows every column."""

_STATE_STYLE: dict[RunState, str] = {
    "finished": "green",
    "failed": "red",
    "stopped": "yellow",
    "running": "cyan",
    "unfinished": "magenta",
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
    """One run in a few numbers; None for what its events do not record."""

    name: str
    path: str
    state: RunState
    model: str | None
    parameters: int | None
    world: int | None
    chip: str | None
    precision: str | None
    """Compute precision."""
    host: str | None
    """Machine of rank 0."""
    step: int
    steps: int | None
    loss: float | None
    baseline_loss: float | None
    held_out_loss: float | None
    """Newest loss over the tokens of all held-out data sets; None if the run evaluated none."""
    held_out: dict[str, float] | None
    """The same of each data set."""
    held_out_step: int | None
    """Step of that evaluation."""
    loss_curve: str
    """The loss so far in a few characters."""
    tokens: int
    tokens_per_second: float | None
    mfu: float | None
    peak_source: str | None
    memory: int | None
    started: float | None
    """Time of the first start, in seconds since the epoch."""
    last_event: float | None
    seconds: float
    skipped_steps: int
    lost_steps: int
    spikes: int
    rewound_steps: int
    """Steps that rewinds after spikes left."""
    warnings: int
    mixture: tuple[DataShare, ...]
    """The data sets that the recipe mixes; empty if it names one."""
    message: str
    """The run's message at its end, or why some of its files could not be read."""


def is_run_folder(path: Path) -> bool:
    """Whether a folder has a run: its events or its recipe."""
    run = RunFolder(path)
    try:
        return run.events.exists() or run.recipe.exists()
    except PermissionError:
        return False


def private_folders(folder: Path) -> list[Path]:
    """Folders in `folder` that this user may not read: private runs of others."""
    return [path for path in sorted(folder.iterdir()) if path.is_dir() and not os.access(path, os.R_OK | os.X_OK)]


def list_runs(folder: Path) -> list[RunSummary]:
    """Every run under `folder`, the newest first; runs without an event come last."""
    if not folder.is_dir():
        hint = "give the folder that holds the runs with --runs-dir"
        raise SpecError([problem_at(folder, 1, "runs", "is not a folder", hint)])
    summaries = [
        summarize_run(RunFolder(path)) for path in sorted(folder.iterdir()) if path.is_dir() and is_run_folder(path)
    ]
    return sorted(summaries, key=lambda summary: -(summary.started or 0))


def find_run(name: str, folder: Path) -> RunFolder:
    """The run called `name` in `folder`, or the run folder at that path; the error for a wrong name suggests one."""
    for path in (folder / name, Path(name)):
        if path.is_dir() and is_run_folder(path):
            return RunFolder(path)
        if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
            hint = 'ask for `access = "group"` in its recipe, or for `chmod -R g+rX` of the folder'
            raise SpecError([problem_at(path, 1, "run", f"is private to {path.owner()}", hint)])
    names = [path.name for path in folder.iterdir() if is_run_folder(path)] if folder.is_dir() else []
    hint = suggest_name(name, names) if names else f"there are no runs in {folder}; give their folder with --runs-dir"
    raise SpecError([problem_at(folder, 1, "run", f'"{name}" is not a run', hint)])


def summarize_run(run: RunFolder, history: RunHistory | None = None) -> RunSummary:
    """Read one run; its events are not read again if their history is given."""
    history = history or read_run_history(run)
    start, evaluations = history.start, history.evaluations
    recipe, errors = _recipe(run)
    unreadable = [f"{len(history.problems)} unreadable lines in {run.events.name}"] if history.problems else []
    unreadable += filter(None, [history.skipped_events])
    return RunSummary(
        name=run.name,
        path=str(run.path),
        state=history.state,
        model=recipe.model.name if recipe else None,
        parameters=start.parameters if start else None,
        world=start.world if start else None,
        chip=start.chip if start else None,
        precision=format_run_precision(start, recipe) or None,
        host=(start.host if start else "") or None,
        step=history.step,
        steps=start.steps if start else None,
        loss=history.loss,
        baseline_loss=history.baseline_loss,
        held_out_loss=evaluations[-1].loss if evaluations else None,
        held_out=dict(evaluations[-1].losses) if evaluations else None,
        held_out_step=evaluations[-1].step if evaluations else None,
        loss_curve=formatting.sparkline([step.loss for step in history.steps if isfinite(step.loss)], SPARKLINE_WIDTH),
        tokens=history.tokens,
        tokens_per_second=history.tokens_per_second,
        mfu=history.mfu,
        peak_source=start.peak_source if start else None,
        memory=history.memory,
        started=history.starts[0].time if start else None,
        last_event=history.last_event,
        seconds=history.running_seconds,
        skipped_steps=len(history.skipped_steps),
        lost_steps=history.lost_steps,
        spikes=len(history.spikes),
        rewound_steps=history.rewound_steps,
        warnings=history.warning_count,
        mixture=_mixture(recipe),
        message="; ".join(
            [*([history.end.message] if history.end and history.end.message else []), *errors, *unreadable]
        ),
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


def _format_mixture(mixture: tuple[DataShare, ...]) -> str:
    """One data set per line: its share, its weight in the recipe, and its path."""
    return "\n".join(
        f"{formatting.percent(data.share)} (weight {data.weight:g})  {escape(data.shards)}" for data in mixture
    )


def runs_table(summaries: list[RunSummary], *, width: int, now: float | None = None) -> Table:
    """The runs as a table of at most `width` characters; model and start are omitted if they do not fit."""
    now = time.time() if now is None else now
    is_wide = width >= WIDE_TABLE_WIDTH
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", no_wrap=True)
    table.add_column("state", min_width=len("not started"))
    if is_wide:
        table.add_column("model", no_wrap=True)
    evaluated = any(run.held_out for run in summaries)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("loss", no_wrap=True)
    if evaluated:
        table.add_column("held out", justify="right", no_wrap=True)
    for title, justify in (("tokens/s", True), ("dtype", False), ("time", True)):
        table.add_column(title, justify="right" if justify else "left", no_wrap=True)
    if is_wide:
        table.add_column("started", no_wrap=True)
    for run in summaries:
        table.add_row(
            f"[bold]{escape(run.name)}[/]",
            _format_state(run, now),
            *([escape(run.model or formatting.MISSING)] if is_wide else []),
            f"{run.step:,}/{run.steps:,}" if run.steps is not None else formatting.MISSING,
            f"{formatting.loss(run.loss)} [yellow]{run.loss_curve}[/]".strip(),
            *([formatting.loss(run.held_out_loss)] if evaluated else []),
            formatting.count(run.tokens_per_second),
            (run.precision or formatting.MISSING).partition(" ")[0],
            formatting.duration(run.seconds) if run.started is not None else formatting.MISSING,
            *([_format_local_time(run.started)] if is_wide else []),
        )
    return table


def _format_state(run: RunSummary, now: float) -> str:
    """The state; if no end is recorded, also the time since the last event."""
    text = f"[{_STATE_STYLE[run.state]}]{run.state}[/]"
    if run.state in ("running", "unfinished") and run.last_event is not None:
        text += f", [dim]last event {formatting.duration(max(0.0, now - run.last_event))} ago[/]"
    return text


def _format_local_time(moment: float | None) -> str:
    return (
        formatting.MISSING if moment is None else datetime.fromtimestamp(moment).astimezone().strftime("%Y-%m-%d %H:%M")
    )


def summary(run: RunFolder) -> Table:
    """A run in a small table: progress, loss, speed, time, and the path of its page."""
    history = read_run_history(run)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in _summary_rows(run, history):
        table.add_row(name, value)
    return table


def _summary_rows(run: RunFolder, history: RunHistory) -> list[tuple[str, str]]:
    start, paced_by = history.start, history.start_of_last_step
    steps = f"{history.step:,}" + (f" of {start.steps:,}" if start else "")
    if history.skipped_steps:
        steps += f", {len(history.skipped_steps):,} skipped"
    if history.lost_steps:
        steps += f", {history.lost_steps:,} repeated after a restart"
    recipe = _recipe(run)[0]
    precision = format_run_precision(paced_by, recipe)
    computed = f", computed in {precision}" if precision else ""
    rows = [
        ("run", f"[bold]{escape(run.name)}[/] [{_STATE_STYLE[history.state]}]{history.state}[/]"),
        ("steps", steps),
        ("loss", _format_loss(history)),
        *([("held out", escape(describe_evaluation(history.evaluations[-1])))] if history.evaluated else []),
        ("tokens/s", f"{formatting.count(history.tokens_per_second)} (median step){computed}"),
        (
            "MFU",
            f"{formatting.percent(history.mfu)} of {format_start_peak(paced_by)}" if paced_by else formatting.MISSING,
        ),
        ("memory", f"{formatting.size(history.memory)} on the fullest rank"),
        ("tokens", _format_tokens(history)),
        ("time", formatting.duration(history.running_seconds)),
    ]
    if mixture := _mixture(recipe):
        rows.append(("mixture", _format_mixture(mixture)))
    if history.saves:
        rows.append(("saved", _format_saves(history)))
    if history.resumes:
        event = history.resumes[-1]
        verified = f"{format_tensor_count(event)} tensors equal, {format_samples(event)}"
        rows.append(("resumed", f"from step {event.step:,}: {verified}"))
    if history.recoveries:
        rows.append(("faults", format_recovery_totals(history.recoveries)))
    if history.spikes:
        rows.append(("spikes", format_spike_totals(history.spikes)))
    if history.warnings:
        rows.append(("warnings", f"{history.warning_count:,}"))
    if history.end and history.end.message:
        rows.append(("message", escape(history.end.message)))
    rows += [("not read", escape(note)) for note in history.unread]
    if run.report.exists():
        rows.append(("page", escape(str(formatting.relative_path(run.report)))))
    return rows


def _format_tokens(history: RunHistory) -> str:
    """Tokens read, and how many of them the loss counted if it did not count all."""
    read, counted = history.tokens, history.counted_tokens
    if read == counted:
        return formatting.count(read)
    return f"{formatting.count(read)}, of which the loss counted {formatting.count(counted)}"


def _format_saves(history: RunHistory) -> str:
    newest, stalls = max(history.saves), [saved.stall for saved in history.saves.values() if saved.stall is not None]
    waited = f", training waited {format_short_duration(max(stalls))} at most" if stalls else ""
    return f"{len(history.saves):,} checkpoint{'s' * (len(history.saves) != 1)}, the newest of step {newest:,}{waited}"


def _format_loss(history: RunHistory) -> str:
    text = formatting.loss(history.loss)
    if history.loss is not None and history.baseline_loss is not None:
        gap = history.baseline_loss - history.loss
        text += f", {abs(gap):.2f} {'below' if gap > 0 else 'above'} a unigram model ({history.baseline_loss:.2f})"
    return text
