"""The events of a run folded into what they tell: which steps count, how fast, how far, how it ended."""

from bisect import bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite
from statistics import median
from typing import Literal

from danlu.report.tail import EventTail
from danlu.spec import Ended, Event, Problem, Rehearsed, Resumed, RunFolder, Saved, Started, StepReport, Warned

State = Literal["not started", "unfinished", "finished", "failed", "stopped"]


@dataclass
class Story:
    """What happened so far. A step that was taken again after a restart counts once, as it was taken last."""

    starts: list[Started] = field(default_factory=list)
    saves: dict[int, Saved] = field(default_factory=dict)
    """By step; a step saved again after a restart counts once."""
    resumes: list[Resumed] = field(default_factory=list)
    """Every time the run went on from a checkpoint, with its proof."""
    rehearsal: Rehearsed | None = None
    """What the newest start found out about saving."""
    warnings: list[Warned] = field(default_factory=list)
    end: Ended | None = None
    """How the run ended; None while it goes on, or when nobody was left to say."""
    problems: list[Problem] = field(default_factory=list)
    """Lines of the event file that could not be read."""
    lost_steps: int = 0
    """Steps that were reported, then taken again from a checkpoint before them."""
    last_event: float | None = None
    """Time of the newest event, in seconds since the epoch."""
    _reports: dict[int, StepReport] = field(default_factory=dict)
    _started: dict[int, Started] = field(default_factory=dict)
    """The start each step belongs to: a run may resume on another number of chips, with another peak."""
    _order: list[int] = field(default_factory=list)
    _spans: list[tuple[float, float]] = field(default_factory=list)
    """First and last event of every start: the time between two starts is nobody's."""

    def add(self, events: Iterable[Event]) -> None:
        """Fold in what is new."""
        for event in events:
            self._add(event)

    def _add(self, event: Event) -> None:
        match event:
            case Started():
                self._restart(event)
            case StepReport():
                if event.step not in self._reports:
                    insort(self._order, event.step)
                self._reports[event.step] = event
                if self.starts:
                    self._started[event.step] = self.starts[-1]
            case Saved():
                self.saves[event.step] = event
            case Resumed():
                self.resumes.append(event)
            case Rehearsed():
                self.rehearsal = event
            case Warned():
                self.warnings.append(event)
            case Ended():
                self.end = event
        self.last_event = max(event.time, self.last_event or event.time)
        if self._spans:
            self._spans[-1] = (self._spans[-1][0], max(self._spans[-1][1], event.time))

    def _restart(self, event: Started) -> None:
        """Steps beyond the one a run resumes from were never part of what it now continues."""
        kept = bisect_right(self._order, event.step)
        for step in self._order[kept:]:
            del self._reports[step]
            self._started.pop(step, None)
        self.lost_steps += len(self._order) - kept
        del self._order[kept:]
        self.starts.append(event)
        self._spans.append((event.time, event.time))
        self.end = None

    @property
    def steps(self) -> list[StepReport]:
        """The reports that count, in order of their steps."""
        return [self._reports[step] for step in self._order]

    @property
    def start(self) -> Started | None:
        """The newest start: what the run is now."""
        return self.starts[-1] if self.starts else None

    @property
    def state(self) -> State:
        """How the run stands by its events alone: unfinished if none tells an end, whether it goes on or was killed."""
        if self.end:
            return self.end.outcome
        return "unfinished" if self.starts or self._reports else "not started"

    @property
    def step(self) -> int:
        """Steps done."""
        if self._order:
            return self._order[-1]
        return self.start.step if self.start else 0

    @property
    def last(self) -> StepReport | None:
        """The newest step."""
        return self._reports[self._order[-1]] if self._order else None

    def newest(self, count: int) -> list[StepReport]:
        """The newest `count` steps, in order."""
        return [self._reports[step] for step in self._order[-count:]]

    @property
    def loss(self) -> float | None:
        """Loss of the newest step that has a finite one and was not skipped."""
        for step in reversed(self._order):
            report = self._reports[step]
            if report.committed and isfinite(report.loss):
                return report.loss
        return None

    @property
    def skipped(self) -> list[int]:
        """Steps whose update was not committed."""
        return [step for step in self._order if not self._reports[step].committed]

    @property
    def resumed(self) -> list[int]:
        """Steps from which the run was taken up again."""
        return [start.step for start in self.starts[1:]]

    @property
    def baseline_loss(self) -> float | None:
        """What a unigram model reaches, where the run says so."""
        return self.start.baseline_loss if self.start else None

    @property
    def tokens(self) -> int:
        """Tokens of all steps that count."""
        return sum(report.tokens for report in self._reports.values())

    @property
    def paced_by(self) -> Started | None:
        """The start that the newest step belongs to: speed and MFU are those of its layout, not of an earlier one."""
        return self._started.get(self._order[-1]) if self._order else self.start

    @property
    def tokens_per_second(self) -> float | None:
        """The median step's, of the newest layout."""
        reports = [self._reports[step] for step in self._order if self._started.get(step) is self.paced_by]
        speeds = [report.tokens / report.seconds for report in reports if report.seconds > 0]
        return median(speeds) if speeds else None

    @property
    def mfu(self) -> float | None:
        """Share of the stated peak that the median step of the newest layout reaches; None where no peak is stated."""
        steps = [step for step in self._order if self._started.get(step) is self.paced_by]
        shares = [share for step in steps if (share := self.mfu_of(step)) is not None]
        return median(shares) if shares else None

    def mfu_of(self, step: int) -> float | None:
        """Share of the peak that one step reaches, against the peak of the start it belongs to."""
        report, start = self._reports[step], self._started.get(step)
        if start is None or start.peak <= 0 or report.seconds <= 0:
            return None
        return report.tokens / report.seconds * start.flops_per_token / start.peak

    @property
    def memory(self) -> int | None:
        """Largest memory of any rank."""
        return max((report.memory for report in self._reports.values()), default=None)

    @property
    def seconds(self) -> float:
        """Time under way: from every start to its last event, without the time between two starts."""
        return sum(end - start for start, end in self._spans)


def read_story(run: RunFolder) -> Story:
    """Everything a run's events tell so far."""
    tail = EventTail(run.events)
    story = Story()
    story.add(tail.new())
    story.problems = tail.problems
    return story
