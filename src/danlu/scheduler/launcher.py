"""One way to start the ranks of a prepared run folder, follow them and stop them: on this machine or through Slurm."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

from danlu.resilience.describe import describe_diagnosis, describe_slow_rank
from danlu.resilience.diagnosis import Diagnosis
from danlu.resilience.straggler_watch import SlowRank
from danlu.spec import EndEvent, RecoveryEvent, RunFolder, SpikeEvent, StartEvent, StepEvent, WarningEvent

EXIT_STOPPED = 3
"""Exit code of a run that was stopped before its last step: a shell does not run what follows `&&`."""


@dataclass(frozen=True)
class LaunchProgress:
    """What one look at the ranks showed, beside what they write into the run folder."""

    is_running: bool
    phase: str = ""
    """What the slowest rank does before its first step; empty if unknown."""
    unwritten_events: tuple[str, ...] = ()
    """Events, as JSON, that ranks could not write to a full disk."""
    notices: tuple[str, ...] = ()
    """Lines for the user, such as a job's new state."""


@dataclass(frozen=True)
class LaunchResult:
    """How the ranks ended."""

    exit_code: int = 0
    """0 if no rank failed."""
    failure: str = ""
    """Which rank failed and why, or how the job ended."""
    log: Path | None = None
    """File or folder with all that the failed ranks printed."""
    log_tail: tuple[str, ...] = ()
    """Its end, unless the failure is explained in one line."""
    killed_on_request: bool = False
    """Ranks were killed by a second stop; that is no failure."""


class Launcher(Protocol):
    """The ranks of one run folder. As a context manager it starts them; on exit none is left that depends on it."""

    run: RunFolder
    stop_requested: bool
    """Whether `stop` was called, by a signal too."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def poll(self) -> LaunchProgress:
        """Look at the ranks."""
        ...

    def wait(self) -> None:
        """Return when it is time for the next `poll`."""
        ...

    def stop(self, *, now: bool = False) -> None:
        """Stop the ranks after their step, with a checkpoint; `now` kills them."""
        ...

    def result(self) -> LaunchResult:
        """How the ranks ended; valid once `poll` showed that none is running."""
        ...


def follow(launcher: Launcher, on_progress: Callable[[LaunchProgress], None]) -> LaunchResult:
    """Look at the ranks regularly until all have ended."""
    while True:
        progress = launcher.poll()
        on_progress(progress)
        if not progress.is_running:
            return launcher.result()
        launcher.wait()


def record_hang(run: RunFolder, found: Diagnosis, quiet: float) -> None:
    """Append that a run does not go on, and who keeps it from that; a full disk is no reason to end it."""
    message = f"no progress for {quiet:.1f} s: {describe_diagnosis(found)}; `danlu why {run.name}` shows more"
    record_warning(run, found.culprits[0].rank if found.culprits else 0, message)


def record_slow_rank(run: RunFolder, slow: SlowRank) -> None:
    """Append that the others wait for a rank, and what that costs."""
    record_warning(run, slow.rank, describe_slow_rank(slow))


def record_warning(run: RunFolder, rank: int, message: str) -> None:
    """Append a warning about a rank; a full disk is no reason to end a run."""
    with suppress(OSError), run.events.open("a") as events:
        events.write(WarningEvent(time=time.time(), rank=rank, message=message).model_dump_json() + "\n")


def record_end(run: RunFolder, outcome: Literal["failed", "stopped"], message: str) -> None:
    """Append the end of a run whose rank 0 could not record it itself."""
    step = 0
    for event in run.read_events():
        if isinstance(event, StartEvent | StepEvent | RecoveryEvent):
            step = event.step
        elif isinstance(event, SpikeEvent) and event.rewound_to is not None:
            step = event.rewound_to
    with run.events.open("a") as events:
        events.write(EndEvent(time=time.time(), step=step, outcome=outcome, message=message).model_dump_json() + "\n")
