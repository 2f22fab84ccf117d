"""A run of two ranks or more that meets fault after fault, beside the same run that meets none."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from danlu.comm.flight_record import read_flights
from danlu.report.event_tail import EventTail
from danlu.report.run_history import RunHistory
from danlu.resilience.injection import InjectionError, inject
from danlu.resilience.process_state import read_process_state
from danlu.spec import EndEvent, RecoveryEvent, RunFolder, StepEvent
from danlu.spec.event import Event
from danlu.spec.fault_mix import INJECTED_FAULTS, InjectedFault

COORDINATOR, AGENT, DOUBLE = "coordinator", "agent", "double"
"""The launcher is killed, and the run resumed; the process that forks ranks is killed with one rank; a second rank is
killed while the run recovers from the first."""
PATIENCE = 300.0
PACE_STEPS = 12
"""Steps after which a run knows its pace, and with it what a hang is."""
RECIPE = """
name = "chaos"
steps = {steps}

[model]
base = "tiny-llama"
vocabulary = 264

[data]
shards = "shards"
source = ["text.txt"]

[batch]
sequences = 8
length = 32

[checkpoint]
every = 25
"""


@dataclass
class Met:
    """One fault, and what the run made of it."""

    kind: str
    rank: int
    seconds: float | None
    """Until the ranks were ready again; None if they never were."""
    steps_lost: int = 0
    source: str = ""


@dataclass
class ChaosRun:
    """A run in a folder of its own, and the faults it met."""

    folder: Path
    world: int
    steps: int
    options: tuple[str, ...] = ()
    recipe: str = RECIPE
    met: list[Met] = field(default_factory=list)
    _process: subprocess.Popen[bytes] | None = None
    _tail: EventTail | None = None

    def prepare(self) -> None:
        """Write the recipe and its text."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
        (self.folder / "recipe.toml").write_text(self.recipe.format(steps=self.steps))

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.folder / "runs" / "chaos")

    def start(self) -> None:
        """Begin, or resume."""
        words = ["resume", "chaos"] if self.run.events.exists() else ["train", "recipe.toml", *self.options]
        words += [] if "--plan" in self.options or words[0] == "resume" else ["--nproc", str(self.world)]
        with (self.folder / "output.txt").open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "danlu", *words], cwd=self.folder, stdout=output, stderr=output
            )
        self._tail = self._tail or EventTail(self.run.events)

    def wait(self) -> int:
        """The exit code, once it has ended; a run that takes no new step for long hangs."""
        assert self._process is not None
        while True:
            before = self._step()
            try:
                return self._process.wait(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                if self._step() == before:
                    raise AssertionError(f"no step after {before} for {PATIENCE:.0f} s: {self.said()}") from None

    def losses(self) -> dict[int, tuple[float, float]]:
        """Loss and norm of every step, as the run counts them."""
        history = RunHistory()
        history.add(self.run.read_events())
        return {step.step: (step.loss, step.norm) for step in history.steps}

    def run_to_end(self) -> None:
        """All steps, with no fault any more."""
        while True:
            code = self.wait()
            if code == 0:
                return
            if code != 3:
                raise AssertionError(f"the run ended with {code}: {self.said()}")
            self.start()

    def said(self) -> str:
        """What the launcher said last, without the ends of logs, which are indented and long."""
        lines = (self.folder / "output.txt").read_text(errors="replace").splitlines()
        return "\n".join([line for line in lines if not line.startswith("  ")][-8:])

    def next_step(self, steps: int = 1) -> None:
        """Return when so many new steps are done."""
        before = self._step()
        deadline = time.monotonic() + PATIENCE
        while self._step() < before + steps:
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"no step after {before}: {self.said()}")
            time.sleep(0.005)

    def first_step_after(self, since: float, seconds: float) -> tuple[StepEvent | None, RecoveryEvent | None]:
        """The recovery that follows and the first step after it; None for what does not come."""
        assert self._tail is not None and self._process is not None
        recovery: RecoveryEvent | None = None
        while time.time() - since < seconds and self._process.poll() is None:
            for event in self._tail.poll():
                if isinstance(event, RecoveryEvent) and event.time > since:
                    recovery = event
                elif isinstance(event, StepEvent) and recovery is not None and event.time > recovery.time:
                    return event, recovery
            time.sleep(0.005)
        return None, recovery

    def interrupt(self) -> None:
        """Kill it at once."""
        assert self._process is not None
        pids = [flight.pid for flight in read_flights(self.run.path, collectives=False)]
        for pid in (self._process.pid, *pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def meet(self, kind: str, rank: int, dice: random.Random) -> Met:
        """Let one fault happen, and wait until the run goes on."""
        assert self._tail is not None and self._process is not None
        self._tail.poll()
        step, began = self._step(), time.time()
        try:
            if kind == COORDINATOR:
                self._process.kill()
                self._process.wait()
            elif kind == AGENT:
                self._kill_agent(rank)
            elif kind == DOUBLE:
                inject(self.run.path, "kill", rank)
                time.sleep(dice.uniform(0.0, 0.6))
                inject(self.run.path, "kill", (rank + 1) % self.world)
            else:
                inject(self.run.path, _known(kind), rank)
        except InjectionError as error:
            raise AssertionError(f"{kind} of rank {rank}: {error}; {self.said()}") from None
        met = self._resume(kind, rank, began) if kind in (COORDINATOR, "preempt") else self._recovery(kind, rank, began)
        met.steps_lost = max(0, step - self._restored_step(step))
        self.met.append(met)
        return met

    def _restored_step(self, step: int) -> int:
        recoveries = [event for event in self.run.read_events() if isinstance(event, RecoveryEvent)]
        return recoveries[-1].step if recoveries else step

    def _kill_agent(self, rank: int) -> None:
        pids = {flight.rank: flight.pid for flight in read_flights(self.run.path, collectives=False)}
        for pid in (read_process_state(pids[rank]).parent, pids[rank]):
            os.kill(pid, signal.SIGKILL)

    def _resume(self, kind: str, rank: int, began: float) -> Met:
        """The run saves and stops, and is started again."""
        assert self._process is not None
        if kind == "preempt":
            code = self._process.wait(timeout=PATIENCE)
            if code not in (0, 3):
                return Met(kind, rank, None)
        deadline = time.monotonic() + PATIENCE
        while any(read_process_state(flight.pid).alive for flight in read_flights(self.run.path, collectives=False)):
            if time.monotonic() > deadline:
                return Met(kind, rank, None)
            time.sleep(0.02)
        if self._ended() != "finished":
            since = time.time()  # the last step of the stopped ranks is not one of the new ones
            self.start()
            while self._step_event(since) is None:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    return Met(kind, rank, None)
                time.sleep(0.02)
        return Met(kind, rank, time.time() - began, source="checkpoint")

    def _ended(self) -> str:
        ends = [event.outcome for event in self.run.read_events() if isinstance(event, EndEvent)]
        return ends[-1] if ends else ""

    def _step_event(self, since: float) -> Event | None:
        assert self._tail is not None
        found = [event for event in self._tail.poll() if isinstance(event, StepEvent) and event.time > since]
        return found[0] if found else None

    def _recovery(self, kind: str, rank: int, began: float) -> Met:
        """The recovery that follows, or the last of two; none if the run ended instead."""
        assert self._tail is not None and self._process is not None
        step, recovery = self.first_step_after(began, PATIENCE)
        if step is None:  # it was the last one
            return Met(kind, rank, 0.0 if self._process.poll() == 0 else None)
        return Met(kind, rank, step.time - began, source=recovery.source if recovery else "")

    def _step(self) -> int:
        if not self.run.path.exists():
            return 0
        return max((flight.step for flight in read_flights(self.run.path, collectives=False)), default=0)


def _known(kind: str) -> InjectedFault:
    return next(each for each in INJECTED_FAULTS if each == kind)


def differences(faulted: ChaosRun, clean: ChaosRun) -> list[str]:
    """Steps whose loss or norm is not, bit for bit, that of the run without faults."""
    ours, theirs = faulted.losses(), clean.losses()
    assert len(theirs) == clean.steps, "a run that took no steps would be equal to any other"
    missing = [f"step {step} is missing" for step in theirs if step not in ours]
    return missing + [
        f"step {step}: {ours[step]} instead of {theirs[step]}" for step in ours if ours[step] != theirs[step]
    ]


def meet_all(
    run: ChaosRun, kinds: Sequence[str], dice: random.Random, on_met: Callable[[], object] = lambda: None
) -> None:
    """One fault after the other, with a step or more between them, at random moments of a step."""
    for kind in kinds:
        run.next_step(PACE_STEPS if kind in ("stop", "lock") else dice.randint(1, 3))
        time.sleep(dice.uniform(0.0, 0.05))
        if run.meet(kind, dice.randrange(run.world), dice).seconds is None:
            raise AssertionError(f"not survived: {run.met[-1]}; {run.said()}")
        on_met()
