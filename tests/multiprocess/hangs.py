"""Hangs of real ranks, injected one after the other, and what the watch of their host says."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from random import Random

from hang_rank import STUCK_IN
from ranks import run_ranks

from danlu.comm.flight_record import read_flights
from danlu.resilience.diagnosis import Diagnosis
from danlu.resilience.host_watch import HostWatch
from danlu.resilience.straggler_watch import SlowRank

CAUSES = (*STUCK_IN, "stopped")
LOOK_SECONDS = 0.05
STRAGGLER_LOOK_SECONDS = 0.01
"""Mean pause between two looks who is slow: about one a step."""
GRACE_SECONDS = 5
"""After its deadline a hang must be found within these, even on a busy machine."""


@dataclass(frozen=True)
class Found:
    """What was said about one injected hang."""

    cause: str
    rank: int
    diagnosis: Diagnosis | None
    seconds: float
    """From the last move of the run to the diagnosis."""
    deadline: float
    """Twice the longest quiet time of its steps, and a second."""

    @property
    def right(self) -> bool:
        """Whether the rank was named, that one alone, with the cause."""
        culprits = self.diagnosis.culprits if self.diagnosis else ()
        return [(each.rank, each.cause) for each in culprits] == [(self.rank, self.cause)]


class HangingRanks:
    """Ranks that take steps in the background, and hang on request."""

    def __init__(self, folder: Path, world: int, compute_seconds: float = 0.01) -> None:
        self.folder, self.world, self.compute_seconds = folder, world, compute_seconds
        self.watch = HostWatch(folder)
        self.false_alarms = 0
        self._random = Random(0)

    @contextmanager
    def running(self, seconds: float) -> Iterator[None]:
        """Start them, at most for so long."""
        failures: list[BaseException] = []

        def start() -> None:
            try:
                script = Path(__file__).with_name("hang_rank.py")
                run_ranks(script, self.world, str(self.folder), str(self.compute_seconds), seconds=seconds)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=start)
        thread.start()
        try:
            while len(read_flights(self.folder)) < self.world and not failures:
                time.sleep(LOOK_SECONDS)
            yield
        finally:
            (self.folder / "stop").touch()
            thread.join()
        if failures:
            raise failures[0]

    def run_clean(self, steps: int) -> None:
        """Watch so many clean steps; an alarm is a false one."""
        until = self._step() + steps
        while self._step() < until:
            self.false_alarms += self.watch.look() is not None
            time.sleep(LOOK_SECONDS)

    def hang(self, cause: str, rank: int, timeout: float = 20.0) -> Found:
        """Inject one hang, wait for the diagnosis, and end it."""
        request, hanging = self.folder / f"hang-{cause}-{rank}", self.folder / "hanging"
        pid = read_flights(self.folder, collectives=False)[rank].pid
        hanging.unlink(missing_ok=True)
        if cause == "stopped":
            os.kill(pid, signal.SIGSTOP)
        else:
            written = request.with_suffix(".tmp")
            written.write_text(str(ceil(self.watch.watch.deadline or 1) + GRACE_SECONDS))
            written.rename(request)
            while not hanging.exists():
                self.false_alarms += self.watch.look() is not None
                time.sleep(LOOK_SECONDS)
        began, found = time.monotonic(), None
        deadline = self.watch.watch.deadline or float("nan")
        while found is None and time.monotonic() - began < timeout:
            found = self.watch.look()
            time.sleep(LOOK_SECONDS)
        seconds = time.monotonic() - began
        if cause == "stopped":
            os.kill(pid, signal.SIGCONT)
        request.unlink(missing_ok=True)
        return Found(cause, rank, found, seconds, deadline)

    def slow_down(self, rank: int, factor: float, looks: int) -> list[SlowRank]:
        """Let a rank compute so many times as long, and look so often who is slow."""
        request = self.folder / f"slow-{rank}"
        request.with_suffix(".tmp").write_text(str(factor))
        request.with_suffix(".tmp").rename(request)
        found = self.look_for_stragglers(looks)
        request.unlink()
        return found

    def look_for_stragglers(self, looks: int) -> list[SlowRank]:
        """Look so often who is slow."""
        self.watch.stragglers.restart()
        found = []
        for _ in range(looks):
            found += self.watch.look_for_stragglers()
            time.sleep(self._random.uniform(0, 2) * STRAGGLER_LOOK_SECONDS)
        return found

    def _step(self) -> int:
        return min(flight.step for flight in read_flights(self.folder, collectives=False))
