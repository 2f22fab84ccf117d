"""What a run is doing, while it does it: one bar and one line in the terminal, plain lines in a log."""

import time
from collections.abc import Callable
from math import isfinite
from types import TracebackType

from rich import live as rich_live
from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from danlu.report import wording
from danlu.report.runs import summary_table
from danlu.report.saving import proof_rows, rehearsal_words, saved_words
from danlu.report.story import Story
from danlu.report.tail import EventTail
from danlu.spec import Event, Rehearsed, Resumed, RunFolder, Saved, Started, StepReport, Warned

WINDOW = 20
"""Newest steps that speed, time left and trend are taken from."""


class Live:
    """The line that `danlu train` shows. Make it before the processes start, call `update` now and then, `close` it.

    What the event file already holds when it is made is taken as history: a resumed run does not
    print its old warnings again.
    """

    def __init__(
        self, run: RunFolder, console: Console, *, every: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.story = Story()
        self._console = console
        self._tail = EventTail(run.events)
        self._every = every
        self._clock = clock
        self._under_way = False
        self._printed_step: int | None = None
        self._printed_at = 0.0
        self._screen: rich_live.Live | None = None
        self._saved: Saved | None = None
        """The newest save since this line is shown."""
        self._warned: set[str] = set()
        self._told_problems = 0
        self.story.add(self._tail.new())

    def __enter__(self) -> "Live":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def update(self) -> None:
        """Read what is new and show it."""
        fresh = self._tail.new()
        self.story.add(fresh)
        self._under_way |= any(isinstance(event, Started | StepReport) for event in fresh)
        self._tell(fresh)
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._draw()
        elif self._under_way:
            self._print_line(last=False)

    def close(self) -> None:
        """Show the last state and leave the terminal as it was."""
        self.update()
        if self._screen:
            self._screen.stop()
            self._screen = None
        elif self._under_way:
            self._print_line(last=True)

    def _tell(self, fresh: list[Event]) -> None:
        """Print every new warning once, above the line; a resume with its proof, and what saving will cost."""
        self._saved = next((event for event in reversed(fresh) if isinstance(event, Saved)), self._saved)
        for event in fresh:
            if isinstance(event, Resumed):
                self._console.print(Text(f"resumed from step {event.step:,}", style="bold"))
                for name, words in proof_rows(event):
                    self._console.print(Text.assemble((f"  {name:<9}", "dim"), words), soft_wrap=True)
            elif isinstance(event, Rehearsed):
                self._console.print(Text(rehearsal_words(event), style="dim"), soft_wrap=True)
        messages = [f"rank {event.rank}: {event.message}" for event in fresh if isinstance(event, Warned)]
        messages += [str(problem) for problem in self._tail.problems[self._told_problems :]]
        self._told_problems = len(self._tail.problems)
        for message in messages:
            if message not in self._warned:
                self._warned.add(message)
                self._console.print(Text.assemble(("warning ", "yellow"), message), soft_wrap=True)

    def _draw(self) -> None:
        if self._screen is None:
            self._screen = rich_live.Live(console=self._console, auto_refresh=False)
            self._screen.start()
        if not self._under_way:
            self._screen.update(Text("waiting for the processes to build the model …", style="dim"), refresh=True)
            return
        steps = self.story.start.steps if self.story.start else None
        bar = Table.grid(padding=(0, 2), expand=False)
        bar.add_row(
            ProgressBar(total=steps, completed=self.story.step, width=min(40, max(10, self._console.width - 44))),
            _progress_words(self.story),
            Text(_left_words(self.story), style="dim"),
        )
        line = Text.assemble(("loss ", "dim"), *_figures(self.story), overflow="ellipsis", no_wrap=True)
        if self._saved:
            line.append(f"  {saved_words(self._saved)}", "dim")
        self._screen.update(Group(bar, line), refresh=True)

    def _print_line(self, *, last: bool) -> None:
        """A plain line for the first step and the last, and in between at most every few seconds."""
        step, now = self.story.step, self._clock()
        if step == self._printed_step or not recent(self.story):
            return
        if not (last or self._printed_step is None or now - self._printed_at >= self._every):
            return
        self._printed_step, self._printed_at = step, now
        figures = "".join(part if isinstance(part, str) else part[0] for part in _figures(self.story))
        line = f"step {_progress_words(self.story)}  loss {figures}"
        line += f"  {saved_words(self._saved)}" if self._saved else ""
        left = _left_words(self.story)
        self._console.print(
            f"{line}  {left}" if left else line, soft_wrap=True, markup=False, highlight=False, emoji=False
        )


def summary(run: RunFolder) -> Table:
    """The small table shown when a run has ended."""
    return summary_table(run)


def recent(story: Story) -> list[StepReport]:
    """The newest steps of the newest start: the ones that tell how the run goes now."""
    done = story.step - story.start.step if story.start else story.step
    return story.newest(min(WINDOW, done)) if done > 0 else []


def speed(story: Story) -> float | None:
    """Tokens a second over the newest steps."""
    steps = recent(story)
    seconds = sum(step.seconds for step in steps)
    return sum(step.tokens for step in steps) / seconds if seconds > 0 else None


def seconds_left(story: Story) -> float | None:
    """Time to the last step at the pace of the newest ones, checkpoints between them included."""
    steps = recent(story)
    if not story.start or not steps:
        return None
    pace = steps[-1].seconds
    if len(steps) > 1:
        pace = (steps[-1].time - steps[0].time) / (steps[-1].step - steps[0].step)
    return pace * (story.start.steps - story.step)


def trend(story: Story) -> str:
    """Whether the loss of the newest steps lies below (↓) or above (↑) that of the steps before them."""
    losses = [step.loss for step in recent(story) if isfinite(step.loss)]
    half = len(losses) // 2
    if not half:
        return ""
    before, after = sum(losses[:half]) / half, sum(losses[-half:]) / half
    if abs(after - before) <= 1e-3 * abs(before):
        return "→"
    return "↓" if after < before else "↑"


def _progress_words(story: Story) -> str:
    if not story.start:
        return f"{story.step:,}"
    share = story.step / story.start.steps if story.start.steps else 1.0
    return f"{story.step:,}/{story.start.steps:,} ({share:.0%})"


def _left_words(story: Story) -> str:
    left = seconds_left(story)
    if story.end or left is None or left <= 0:
        return ""
    return f"{wording.duration(left)} left"


def _figures(story: Story) -> list[str | tuple[str, str]]:
    """Loss, speed, MFU and memory, each with its style."""
    last, pace = story.last, speed(story)
    if last is None or not recent(story):
        return [("no step yet", "dim")]
    start = story.start
    mfu = pace * start.flops_per_token / start.peak if pace and start and start.peak > 0 else None
    direction = trend(story)
    style = {"↓": "green", "↑": "red"}.get(direction, "dim")
    shown = wording.loss(last.loss) if isfinite(last.loss) else str(last.loss)
    parts: list[str | tuple[str, str]] = [(shown, "bold"), (f" {direction}" if direction else "", style)]
    parts += [f"  {wording.count(pace)} tokens/s", f"  MFU {wording.percent(mfu)}", f"  {wording.size(last.memory)}"]
    if not last.committed:
        parts.append(("  update skipped", "red"))
    return parts
