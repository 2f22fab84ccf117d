"""The events of a run, aggregated: which steps count, speed, progress, outcome."""

from bisect import bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from math import isfinite
from statistics import median
from typing import Literal

from danlu.report.event_tail import EventTail
from danlu.spec import (
    EndEvent,
    EvaluationEvent,
    Event,
    PreflightEvent,
    Problem,
    RecoveryEvent,
    ResumeEvent,
    RunFolder,
    SaveEvent,
    SpikeEvent,
    StartEvent,
    StepEvent,
    WarningEvent,
)
from danlu.spec.event import describe_unknown_events
from danlu.spec.recipe import BatchConfig
from danlu.storage import run_lock

MAX_WARNINGS = 10_000
"""Warnings of a run that are read; further ones are counted: a file of a million takes seconds and says no more."""
RunState = Literal["not started", "running", "unfinished", "finished", "failed", "stopped"]


@dataclass(frozen=True, kw_only=True)
class StartStats:
    """Statistics of one start of a run."""

    steps: int
    """Its steps that count."""
    tokens_per_second: float | None
    """Of the median step."""
    step_seconds: float | None
    """Of the median step."""
    mfu: float | None
    memory: int | None
    """Largest of any rank."""


@dataclass
class RunHistory:
    """What happened so far. A step repeated after a restart or a rewind counts once, with its last values."""

    starts: list[StartEvent] = field(default_factory=list)
    saves: dict[int, SaveEvent] = field(default_factory=dict)
    """By step; a step saved again after a restart counts once."""
    evaluated: dict[int, EvaluationEvent] = field(default_factory=dict)
    """By step; a step evaluated again after a restart counts once."""
    resumes: list[ResumeEvent] = field(default_factory=list)
    """Every resume from a checkpoint, with its verification."""
    recoveries: list[RecoveryEvent] = field(default_factory=list)
    """Every time that ranks were lost and the run went on."""
    preflight: PreflightEvent | None = None
    """What the newest start measured about saving."""
    spikes: list[SpikeEvent] = field(default_factory=list)
    """Every spike that was found, those of a branch that was left included."""
    warnings: list[WarningEvent] = field(default_factory=list)
    end: EndEvent | None = None
    """How the run ended; None while it runs, or if every process was killed."""
    is_running: bool = False
    """Whether the run's lock is held, whatever the events say."""
    problems: list[Problem] = field(default_factory=list)
    """Lines of the event file that could not be read."""
    skipped_events: str = ""
    """How many events of which kinds were skipped because only a newer Danlu knows them; empty if none was."""
    warnings_left_out: int = 0
    """Warnings beyond the first `MAX_WARNINGS`, which were counted and not read."""
    lost_steps: int = 0
    """Steps that were reported, then repeated from an earlier checkpoint after a restart."""
    rewound_steps: int = 0
    """Steps that were reported, then left by a rewind after a spike."""
    continued_from: int = 0
    """The step after which the newest steps follow each other without a restart or a rewind."""
    last_event: float | None = None
    """Time of the newest event, in seconds since the epoch."""
    _reports: dict[int, StepEvent] = field(default_factory=dict)
    _started: dict[int, StartEvent] = field(default_factory=dict)
    """The start each step belongs to: a run may resume on another number of chips, with another peak."""
    _order: list[int] = field(default_factory=list)
    _passed_over: list[tuple[int, int]] = field(default_factory=list)
    """Of every rewind that counts, its step and the samples that were passed over after it."""
    _spans: list[tuple[float, float]] = field(default_factory=list)
    """First and last event of every start: the time between two starts is not counted."""

    def add(self, events: Iterable[Event]) -> None:
        """Add new events."""
        for kind, group in groupby(events, type):  # a long run has a million events, most of them alike
            together: list[Event] = list(group)
            if kind is WarningEvent:
                self.warnings += together  # type: ignore[arg-type]
            else:
                for event in together:
                    self._add(event)
            newest = max(event.time for event in together)
            self.last_event = max(newest, self.last_event or newest)
            if self._spans:
                self._spans[-1] = (self._spans[-1][0], max(self._spans[-1][1], newest))

    def _add(self, event: Event) -> None:
        match event:
            case StepEvent():
                if event.step not in self._reports:
                    insort(self._order, event.step)
                self._reports[event.step] = event
                if self.starts:
                    self._started[event.step] = self.starts[-1]
            case StartEvent():
                self._restart(event)
            case SpikeEvent():
                self._add_spike(event)
            case SaveEvent():
                self.saves[event.step] = event
            case EvaluationEvent():
                self.evaluated[event.step] = event
            case ResumeEvent():
                self.resumes.append(event)
            case RecoveryEvent():
                self.lost_steps += self._drop_steps_after(event.step)
                self.recoveries.append(event)
            case PreflightEvent():
                self.preflight = event
            case EndEvent():
                self.end = event

    def _restart(self, event: StartEvent) -> None:
        """Drop the steps beyond the one that the run resumes from."""
        self.lost_steps += self._drop_steps_after(event.step)
        self.starts.append(event)
        self._spans.append((event.time, event.time))
        self.end = None

    def _add_spike(self, event: SpikeEvent) -> None:
        """Add a spike; a rewind leaves the steps and checkpoints beyond the one that it went back to."""
        self.spikes.append(event)
        if event.rewound_to is not None:
            self.rewound_steps += self._drop_steps_after(event.rewound_to)
            self._passed_over.append((event.rewound_to, event.lost_samples))
            self.saves = {step: saved for step, saved in self.saves.items() if step <= event.rewound_to}

    def _drop_steps_after(self, last: int) -> int:
        """Drop the reports of later steps; how many there were."""
        kept = bisect_right(self._order, last)
        dropped = self._order[kept:]
        for step in dropped:
            del self._reports[step]
            self._started.pop(step, None)
        del self._order[kept:]
        self._passed_over = [rewind for rewind in self._passed_over if rewind[0] < last]  # its samples come after it
        self.evaluated = {step: each for step, each in self.evaluated.items() if step <= last}
        self.continued_from = last
        return len(dropped)

    @property
    def steps(self) -> list[StepEvent]:
        """The reports that count, in order of their steps."""
        return [self._reports[step] for step in self._order]

    @property
    def evaluations(self) -> list[EvaluationEvent]:
        """Losses on held-out data, in order of their steps."""
        return [self.evaluated[step] for step in sorted(self.evaluated)]

    @property
    def start(self) -> StartEvent | None:
        """The newest start."""
        return self.starts[-1] if self.starts else None

    @property
    def state(self) -> RunState:
        """The run's state: running while its lock is held; unfinished if it is not held and no end is recorded."""
        if self.is_running:
            return "running"
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
    def last_step(self) -> StepEvent | None:
        """The newest step."""
        return self._reports[self._order[-1]] if self._order else None

    def last_steps(self, count: int) -> list[StepEvent]:
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
    def skipped_steps(self) -> list[int]:
        """Steps whose update was not committed."""
        return [step for step in self._order if not self._reports[step].committed]

    @property
    def rewinds(self) -> list[SpikeEvent]:
        """Spikes after which the run went back, those of a branch that was left included."""
        return [spike for spike in self.spikes if spike.rewound_to is not None]

    def first_sample(self, step: int, batch: BatchConfig) -> int:
        """Number of the first sample that a step has read, in the run as it is now: rewinds passed over some."""
        done = sample = 0
        for rewound_to, passed_over in self._passed_over:
            if rewound_to < step:
                sample = batch.cursor_after(rewound_to - done, sample) + passed_over
                done = rewound_to
        return batch.cursor_after(step - 1 - done, sample)

    @property
    def warning_count(self) -> int:
        """All warnings, those included that were not read."""
        return len(self.warnings) + self.warnings_left_out

    @property
    def unread(self) -> list[str]:
        """What of the event file was not read, and why: a note each."""
        notes = [str(problem) for problem in self.problems]
        if self.skipped_events:
            notes.append(self.skipped_events)
        if self.warnings_left_out:
            notes.append(f"{self.warnings_left_out:,} further warnings were counted and are not shown")
        return notes

    @property
    def resume_steps(self) -> list[int]:
        """Steps from which the run was resumed."""
        return [start.step for start in self.starts[1:]]

    @property
    def baseline_loss(self) -> float | None:
        """The loss of a unigram model, if the run recorded it."""
        return self.start.baseline_loss if self.start else None

    @property
    def tokens(self) -> int:
        """Tokens of all steps that count."""
        return sum(report.tokens for report in self._reports.values())

    @property
    def counted_tokens(self) -> int:
        """Of these, tokens whose prediction the loss counts."""
        reports = self._reports.values()
        return sum(report.tokens if report.counted is None else report.counted for report in reports)

    @property
    def start_of_last_step(self) -> StartEvent | None:
        """The start of the newest step: speed and MFU are those of its layout, not of an earlier one."""
        return self._started.get(self._order[-1]) if self._order else self.start

    @property
    def tokens_per_second(self) -> float | None:
        """Of the median step of the newest layout."""
        return self.stats_of(self.start_of_last_step).tokens_per_second

    @property
    def mfu(self) -> float | None:
        """MFU of the median step of the newest layout; None without a peak."""
        return self.stats_of(self.start_of_last_step).mfu

    def stats_of(self, start: StartEvent | None) -> "StartStats":
        """Statistics of one start, without steps of other starts on other layouts or machines."""
        steps = [step for step in self._order if self._started.get(step) is start]
        reports = [self._reports[step] for step in steps]
        speeds = [report.tokens / report.seconds for report in reports if report.seconds > 0]
        shares = [share for step in steps if (share := self.step_mfu(step)) is not None]
        return StartStats(
            steps=len(steps),
            tokens_per_second=median(speeds) if speeds else None,
            step_seconds=median(report.seconds for report in reports) if reports else None,
            mfu=median(shares) if shares else None,
            memory=max((report.memory for report in reports), default=None),
        )

    def step_mfu(self, step: int) -> float | None:
        """MFU of one step, relative to the peak of its start."""
        report, start = self._reports[step], self._started.get(step)
        if start is None or start.peak <= 0 or report.seconds <= 0:
            return None
        return report.tokens / report.seconds * start.flops_per_token / start.peak

    @property
    def memory(self) -> int | None:
        """Largest memory of any rank in the newest layout."""
        return self.stats_of(self.start_of_last_step).memory

    @property
    def running_seconds(self) -> float:
        """Running time: from every start to its last event, without the time between two starts."""
        return sum(end - start for start, end in self._spans)

    @property
    def goodput(self) -> float | None:
        """The share of the running time that steps took whose updates are in the weights; None before the first."""
        seconds = sum(report.seconds for report in self._reports.values() if report.committed)
        return seconds / self.running_seconds if self._reports and self.running_seconds > 0 else None

    @property
    def elapsed_seconds(self) -> list[float]:
        """The running time at the end of each of `steps`, without the time between two starts."""
        before, offsets = 0.0, dict[int, float]()
        for start, (first, last) in zip(self.starts, self._spans, strict=True):
            offsets[id(start)] = before - first
            before += last - first
        origin = -self.steps[0].time if self._order else 0.0  # of steps whose start is not recorded
        return [offsets.get(id(self._started.get(report.step)), origin) + report.time for report in self.steps]


def read_run_history(run: RunFolder) -> RunHistory:
    """Read the history of a run from its events so far."""
    tail = EventTail(run.events, most_warnings=MAX_WARNINGS)
    history = RunHistory()
    history.add(tail.poll())
    history.problems = tail.problems
    history.skipped_events = describe_unknown_events(tail.unknown)
    history.warnings_left_out = tail.warnings_left_out
    history.is_running = run_lock.read_holder(run) is not None
    return history
