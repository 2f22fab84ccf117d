"""Progress of a run: one bar and one line in the terminal, plain lines in a log."""

import time
from collections.abc import Callable, Iterable
from math import isfinite
from types import TracebackType

from rich import live as rich_live
from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from danlu.report import formatting
from danlu.report.checkpoints import format_save, format_save_estimate, resume_rows
from danlu.report.evaluations import format_evaluation
from danlu.report.event_tail import EventTail
from danlu.report.recoveries import format_recovery
from danlu.report.run_history import RunHistory
from danlu.report.spikes import format_spike
from danlu.report.terminal import Console
from danlu.spec import (
    Event,
    PreflightEvent,
    RecoveryEvent,
    ResumeEvent,
    RunFolder,
    SaveEvent,
    SpikeEvent,
    StartEvent,
    StepEvent,
    WarningEvent,
)
from danlu.spec.event import parse_known_events

_SLOW_PHASE_SECONDS = 10.0
"""Seconds after which a log, which has no bar, gets a line on what the processes are doing."""

RECENT_STEPS = 20
"""Number of newest steps from which speed, time left and trend are computed."""


class ProgressDisplay:
    """The line that `danlu train` shows. Create it before the processes start, call `update` regularly, `close` it.

    Events already in the file when it is created are history: a resumed run does not print its old warnings again.
    """

    def __init__(
        self, run: RunFolder, console: Console, *, every: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.history = RunHistory()
        self._console = console
        self._tail = EventTail(run.events)
        self._every = every
        self._clock = clock
        self._under_way = False
        self._printed_step: int | None = None
        self._printed_at = 0.0
        self._screen: rich_live.Live | None = None
        self._saved: SaveEvent | None = None
        """The newest save since this display was created."""
        self._warned: set[str] = set()
        self._reported_problems = 0
        self._phase, self._phase_since, self._phase_printed = "", clock(), False
        self._phase_over = False
        """Whether a step was done since the phase was reported."""
        self.history.add(self._tail.poll())

    def __enter__(self) -> "ProgressDisplay":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def update(self, unwritten: Iterable[str] = (), phase: str = "") -> None:
        """Read and show new events, and `unwritten` ones that could not be written to a full disk.

        `phase` is what the processes do until their next step is done.
        """
        fresh = [*self._tail.poll(), *parse_known_events(unwritten, self._tail.unknown)]
        if phase != self._phase:
            self._phase, self._phase_since, self._phase_printed = phase, self._clock(), False
            self._phase_over = False
        elif any(isinstance(event, StepEvent) for event in fresh):
            self._phase_over = True
        self.history.add(fresh)
        self._under_way |= any(isinstance(event, StartEvent | StepEvent) for event in fresh)
        self._print_events(fresh)
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._draw()
        else:
            self._print_phase()
            if self._under_way:
                self._print_line(last=False)

    def close(self) -> None:
        """Show the last state and restore the terminal."""
        self.update()
        if self._screen:
            self._screen.stop()
            self._screen = None
        elif self._under_way:
            self._print_line(last=True)

    def _print_events(self, fresh: list[Event]) -> None:
        """Print every new warning once, above the line; also spikes, resumes as verified, and the cost of saving."""
        for event in fresh:
            if isinstance(event, SaveEvent):
                self._saved = event
            elif isinstance(event, ResumeEvent):
                self._console.print(Text(f"resumed from step {event.step:,}", style="bold"))
                for name, text in resume_rows(event):
                    self._console.print(Text.assemble((f"  {name:<9}", "dim"), text), soft_wrap=True)
            elif isinstance(event, RecoveryEvent):
                self._console.print(Text.assemble(("fault   ", "red"), format_recovery(event)), soft_wrap=True)
            elif isinstance(event, PreflightEvent):
                self._console.print(Text(format_save_estimate(event), style="dim"), soft_wrap=True)
            elif isinstance(event, SpikeEvent):
                self._console.print(Text.assemble(("spike   ", "red"), format_spike(event)), soft_wrap=True)
                if event.rewound_to is not None:
                    self._saved = None  # a rewind deletes later checkpoints
        messages = [f"rank {event.rank}: {event.message}" for event in fresh if isinstance(event, WarningEvent)]
        messages += [str(problem) for problem in self._tail.problems[self._reported_problems :]]
        self._reported_problems = len(self._tail.problems)
        messages += [f'events of kind "{kind}" are skipped: a newer Danlu wrote them' for kind in self._tail.unknown]
        for message in messages:
            if message not in self._warned:
                self._warned.add(message)
                self._console.print(Text.assemble(("warning ", "yellow"), message), soft_wrap=True)

    def _draw(self) -> None:
        if self._screen is None:
            self._screen = rich_live.Live(console=self._console, auto_refresh=False)
            self._screen.start()
        if not self._under_way:
            self._screen.update(Text(self._format_phase() or "starting …", style="dim"), refresh=True)
            return
        steps = self.history.start.steps if self.history.start else None
        bar = Table.grid(padding=(0, 2), expand=False)
        bar.add_row(
            ProgressBar(total=steps, completed=self.history.step, width=min(40, max(10, self._console.width - 44))),
            _format_progress(self.history),
            Text(_format_eta(self.history), style="dim"),
        )
        line = Text.assemble(("loss ", "dim"), *_figures(self.history), overflow="ellipsis", no_wrap=True)
        if self._phase and not self._phase_over:
            line = Text(self._format_phase(), style="dim", overflow="ellipsis", no_wrap=True)
        if self.history.evaluated:
            line.append(f"  {format_evaluation(self.history.evaluations[-1])}")
        if self._saved:
            line.append(f"  {format_save(self._saved)}", "dim")
        self._screen.update(Group(bar, line), refresh=True)

    def _format_phase(self) -> str:
        return f"{self._phase} … {self._clock() - self._phase_since:.0f} s" if self._phase else ""

    def _print_phase(self) -> None:
        """A plain line, once, for a slow phase: before the first step, or an evaluation."""
        waits = self._phase and not self._phase_over
        if waits and not self._phase_printed and self._clock() - self._phase_since >= _SLOW_PHASE_SECONDS:
            self._phase_printed = True
            self._console.print(Text(self._format_phase(), style="dim"), soft_wrap=True)

    def _print_line(self, *, last: bool) -> None:
        """A plain line for the first step and the last, and in between at most every few seconds."""
        step, now = self.history.step, self._clock()
        if step == self._printed_step or not recent_steps(self.history):
            return
        if not (last or self._printed_step is None or now - self._printed_at >= self._every):
            return
        self._printed_step, self._printed_at = step, now
        figures = "".join(item if isinstance(item, str) else item[0] for item in _figures(self.history))
        line = f"step {_format_progress(self.history)}  loss {figures}"
        line += f"  {format_evaluation(self.history.evaluations[-1])}" if self.history.evaluated else ""
        line += f"  {format_save(self._saved)}" if self._saved else ""
        left = _format_eta(self.history)
        self._console.print(
            f"{line}  {left}" if left else line, soft_wrap=True, markup=False, highlight=False, emoji=False
        )


def recent_steps(history: RunHistory) -> list[StepEvent]:
    """The newest steps since the last start or rewind: they show how the run performs now."""
    done = history.step - history.continued_from
    return history.last_steps(min(RECENT_STEPS, done)) if done > 0 else []


def recent_tokens_per_second(history: RunHistory) -> float | None:
    """Tokens per second over the newest steps."""
    steps = recent_steps(history)
    seconds = sum(step.seconds for step in steps)
    return sum(step.tokens for step in steps) / seconds if seconds > 0 else None


def eta_seconds(history: RunHistory) -> float | None:
    """Time to the last step at the pace of the newest ones, checkpoints between them included."""
    steps = recent_steps(history)
    if not history.start or not steps:
        return None
    pace = steps[-1].seconds
    if len(steps) > 1:
        pace = (steps[-1].time - steps[0].time) / (steps[-1].step - steps[0].step)
    return pace * (history.start.steps - history.step)


def loss_trend(history: RunHistory) -> str:
    """Whether the loss of the newest steps is below (↓) or above (↑) that of the steps before them."""
    losses = [step.loss for step in recent_steps(history) if isfinite(step.loss)]
    half = len(losses) // 2
    if not half:
        return ""
    before, after = sum(losses[:half]) / half, sum(losses[-half:]) / half
    if abs(after - before) <= 1e-3 * abs(before):
        return "→"
    return "↓" if after < before else "↑"


def _format_progress(history: RunHistory) -> str:
    if not history.start:
        return f"{history.step:,}"
    share = history.step / history.start.steps if history.start.steps else 1.0
    return f"{history.step:,}/{history.start.steps:,} ({share:.0%})"


def _format_eta(history: RunHistory) -> str:
    left = eta_seconds(history)
    if history.end or left is None or left <= 0:
        return ""
    return f"{formatting.duration(left)} left"


def _figures(history: RunHistory) -> list[str | tuple[str, str]]:
    """Loss, speed, MFU and memory, each with its style."""
    last, pace = history.last_step, recent_tokens_per_second(history)
    if last is None or not recent_steps(history):
        return [("no step yet", "dim")]
    start = history.start
    mfu = pace * start.flops_per_token / start.peak if pace and start and start.peak > 0 else None
    direction = loss_trend(history)
    style = {"↓": "green", "↑": "red"}.get(direction, "dim")
    shown = formatting.loss(last.loss) if isfinite(last.loss) else str(last.loss)
    figures: list[str | tuple[str, str]] = [(shown, "bold"), (f" {direction}" if direction else "", style)]
    figures += [f"  {formatting.count(pace)} tokens/s", _format_mfu(mfu, start), f"  {formatting.size(last.memory)}"]
    if not last.committed:
        figures.append((f"  update skipped{f': {last.reason}' if last.reason else ''}", "red"))
    return figures


def _format_mfu(mfu: float | None, start: StartEvent | None) -> str:
    return f"  MFU {formatting.percent(mfu)}" + (f" in {start.dtype}" if start and start.dtype else "")
