"""Ranks that die or hang are replaced, on one host or on several, and the run goes on from its newest state."""

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from danlu.comm.launcher_link import LOADING_PHASES, RegroupOrder
from danlu.resilience.describe import describe_diagnosis
from danlu.resilience.diagnosis import Diagnosis
from danlu.resilience.policy import (
    Fault,
    FaultKind,
    Means,
    Replace,
    Replan,
    Restore,
    Shrink,
    Stop,
    decide,
    quarantined_steps,
)
from danlu.resilience.straggler_watch import SlowRank
from danlu.scheduler.fork_server import RankProcess
from danlu.scheduler.launcher import record_hang, record_slow_rank
from danlu.spec import Plan, RankFailureEvent, RunFolder

JOIN_SECONDS = 5.0
"""Seconds that a rank has to leave a world after it was ordered to; then it is killed, and replaced too."""
READY_SECONDS = 60.0
"""Seconds that ranks have at least to build and restore; three times as long as the first start if that took longer."""
LOADING_SECONDS = 1800.0
"""The same of ranks that read a checkpoint or data, which takes as long as the store takes."""
LOST_SECONDS = 0.5
"""Seconds after connections broke in which a rank that died is surely seen; after that it was the network."""
_SETTLE_SECONDS = 0.02
"""Ranks that end together, as those of a host do, are seen one by one."""
_NOT_KILLED_FOR = ("data", "storage", "file system")
"""What a new process would wait for too."""


class RankReports(Protocol):
    """What ranks report about themselves, and how they are reached."""

    def phase_of(self, rank: int) -> str:
        """What a rank said last that it is doing."""
        ...

    def trains(self, rank: int) -> bool:
        """Whether a rank has come to its first step since it started."""
        ...

    def generation_of(self, rank: int) -> int:
        """The newest world that a rank reported."""
        ...

    def has_lost(self, generation: int) -> bool:
        """Whether a rank reported that connections of this world broke."""
        ...

    def forget_phases(self) -> None:
        """All ranks start again."""
        ...

    def order(self, rank: int, order: RegroupOrder | None) -> None:
        """Order a rank to regroup; None says that no such order will come."""
        ...


class RunWatch(Protocol):
    """Says who keeps a run from going on."""

    @property
    def quiet(self) -> float:
        """Seconds since any rank moved."""
        ...

    def look(self) -> Diagnosis | None:
        """A diagnosis if the run has just been found to hang."""
        ...

    def look_for_stragglers(self) -> Sequence[SlowRank]:
        """Ranks that have just been found to keep the others waiting."""
        ...

    def restart(self) -> None:
        """The ranks have started again."""
        ...


class RecoverableRanks(Protocol):
    """What recovery needs of whoever started the ranks."""

    run: RunFolder

    @property
    def links(self) -> RankReports:
        """What they report."""
        ...

    @property
    def watch(self) -> RunWatch:
        """Who hangs."""
        ...

    @property
    def processes(self) -> Sequence[RankProcess]:
        """Of every rank."""
        ...

    @property
    def means(self) -> Means:
        """What is left to go on with."""
        ...

    @property
    def furthest_step(self) -> int:
        """Steps done by the rank that is furthest."""
        ...

    @property
    def is_importing(self) -> bool:
        """Whether new ranks still wait for torch to be imported."""
        ...

    def failure(self, rank: int) -> RankFailureEvent | None:
        """What a rank reported about its failure."""
        ...

    def describe(self, rank: int) -> str:
        """Why a rank ended, in one line."""
        ...

    def endpoint_of(self, generation: int) -> str:
        """Where the ranks of a world meet."""
        ...

    def lost_host(self, rank: int) -> str:
        """The host that a rank was lost with; empty if its host is there."""
        ...

    def replace(self, ranks: Sequence[int], order: RegroupOrder, host: str = "") -> None:
        """Start new processes in the place of ranks that have ended, and order the others to join them.

        They start on another `host` if one is given; in an order that is `resized`, they are all ranks of its plan.
        """
        ...


@dataclass(frozen=True)
class RecoveryState:
    """What must be known to go on deciding for ranks that run already."""

    generation: int = 0
    faults: tuple[Fault, ...] = ()
    start_seconds: float = 0.0
    """How long the first start took; 0 before it is over."""
    has_started: bool = False
    """Whether the ranks have trained before."""
    plan: str = ""
    """Of the ranks that are left, as JSON, if they are fewer than at first."""


class Recovery:
    """Looks at the ranks of a launch now and then, and carries out what the policy decides."""

    def __init__(self, ranks: RecoverableRanks, restarts: int, state: RecoveryState | None = None) -> None:
        """Without `restarts` it only says who hangs."""
        self._took_over = state is not None
        """Whether the ranks may just be meeting in a store that was lost with whoever decided before."""
        state = state or RecoveryState()
        self.generation = state.generation
        self.faults: list[Fault] = list(state.faults)
        self.reason = ""
        """Why the run is not recovered any more; empty while it is."""
        self._ranks, self._restarts = ranks, restarts
        self._killed: dict[int, str] = {}
        """Ranks that were killed from here, and why."""
        self._started_at = self._ordered_at = time.monotonic()
        self._start_seconds = state.start_seconds
        self._lost_since: float | None = None
        self._plan = state.plan
        self._is_ready, self._has_started = False, state.has_started

    @property
    def state(self) -> RecoveryState:
        """For whoever takes over."""
        faults = tuple(self.faults)
        return RecoveryState(self.generation, faults, self._start_seconds, self._has_started, self._plan)

    def look(self, *, recover: bool = True) -> None:
        """Say who hangs; replace who is lost or hangs, unless the run is to end anyway."""
        recover = recover and self._restarts > 0
        lost = [rank for rank, process in enumerate(self._ranks.processes) if process.poll()]
        if lost:
            if recover and not self.reason:
                time.sleep(_SETTLE_SECONDS)
                self._handle(self._fault_of([rank for rank, each in enumerate(self._ranks.processes) if each.poll()]))
            return
        if not self._is_ready:
            self._watch_start(recover)
        elif (hang := self._ranks.watch.look()) is not None:
            self._on_hang(hang, recover)
        elif recover and self._network_is_broken():
            self._handle(self._network_fault("connections between ranks broke"))
        else:
            for slow in self._ranks.watch.look_for_stragglers():
                record_slow_rank(self._ranks.run, slow)

    def _watch_start(self, recover: bool) -> None:
        """Ranks that do not leave the last world, or do not get ready in the new one, are killed."""
        ranks, links, now = range(len(self._ranks.processes)), self._ranks.links, time.monotonic()
        if all(map(links.trains, ranks)):
            self._is_ready, self._took_over = True, False
            self._start_seconds = self._start_seconds or now - self._started_at
            self._ranks.watch.restart()
            return
        if recover and self._took_over and self._network_is_broken():
            self._handle(self._network_fault("connections between ranks broke while they started"))
            return
        if self._ranks.is_importing:
            self._ordered_at = now
        waited = now - self._ordered_at
        if not recover or not self.generation or waited < JOIN_SECONDS:
            return
        for rank in (rank for rank in ranks if links.generation_of(rank) < self.generation):
            self._kill(rank, f"rank {rank} did not come to generation {self.generation} in {waited:.0f} s")
        if waited > max(READY_SECONDS, 3 * self._start_seconds):
            for rank in (rank for rank in ranks if not links.trains(rank) and rank not in self._killed):
                phase = links.phase_of(rank)
                if waited > LOADING_SECONDS or phase not in LOADING_PHASES:
                    self._kill(rank, f"rank {rank} did not train after {waited:.0f} s, but was {phase or 'silent'}")

    def _on_hang(self, found: Diagnosis, recover: bool) -> None:
        record_hang(self._ranks.run, found, self._ranks.watch.quiet)
        if not recover:
            return
        why = describe_diagnosis(found)
        if all(culprit.cause in ("network", "mismatch") for culprit in found.culprits):
            self._handle(self._network_fault(f"nothing moves: {why}"))
            return
        for culprit in found.culprits:
            if culprit.cause not in _NOT_KILLED_FOR:
                self._kill(culprit.rank, f"nothing moved, and who was waited for was killed: {why}")

    def _kill(self, rank: int, why: str) -> None:
        self._killed.setdefault(rank, why)
        self._ranks.processes[rank].send_signal(signal.SIGKILL)

    def _network_is_broken(self) -> bool:
        """Whether ranks lost their connections, and none of them has died for a while."""
        if not self._ranks.links.has_lost(self.generation):
            self._lost_since = None
            return False
        self._lost_since = self._lost_since or time.monotonic()
        return time.monotonic() - self._lost_since > LOST_SECONDS

    def _network_fault(self, message: str) -> Fault:
        return Fault(time.time(), (), "network", self._ranks.furthest_step, message)

    def _fault_of(self, lost: Sequence[int]) -> Fault:
        first = min(lost, key=self._order_of_loss)
        failure, code = self._ranks.failure(first), self._ranks.processes[first].returncode or 0
        host = next(filter(None, map(self._ranks.lost_host, lost)), "")
        kind: FaultKind = "killed"
        if host:
            kind = "host"
        elif first in self._killed:
            kind = "hang"
        elif failure is not None and code > 0:
            kind = "explained" if failure.explained else "exception"
        message = f"host {host} is lost" if host else self._killed.get(first) or self._ranks.describe(first)
        return Fault(time.time(), tuple(lost), kind, self._ranks.furthest_step, message, host)

    def _order_of_loss(self, rank: int) -> tuple[bool, float]:
        """Those that a signal ended come first, then those that reported a failure, by when they did."""
        failure = self._ranks.failure(rank)
        return (self._ranks.processes[rank].returncode or 0) > 0, failure.time if failure else float("inf")

    def _handle(self, fault: Fault) -> None:
        self.faults.append(fault)
        means, processes = self._ranks.means, self._ranks.processes
        every = range(len(processes))
        decision = decide(self.faults, means, self._restarts)
        if isinstance(decision, Stop):
            self.reason = decision.reason
            for rank in every:
                self._ranks.links.order(rank, None)
            return
        self._has_started |= self._ranks.links.trains(0)
        is_smaller = isinstance(decision, Shrink | Replan)
        if is_smaller or isinstance(decision, Restore):
            for process in processes:
                process.send_signal(signal.SIGKILL)
            for process in processes:
                process.wait()
        if isinstance(decision, Restore) and (lost := [rank for rank in every if self._ranks.lost_host(rank)]):
            self._handle(self._fault_of(lost))  # a node died while it was waited for
            return
        gone = [rank for rank, process in enumerate(processes) if process.poll() is not None]
        cause = fault.message
        if is_smaller:
            self._plan = means.smaller_plan
            gone = list(range(Plan.model_validate_json(self._plan).degrees.world))
            cause += f": none waits, and the run goes on with {len(gone)} of {len(processes)} ranks"
        self.generation += 1
        order = RegroupOrder(
            generation=self.generation,
            endpoint=self._ranks.endpoint_of(self.generation),
            ranks=tuple(gone),
            cause=cause,
            failed_at=fault.time,
            has_started=self._has_started,
            quarantined=quarantined_steps(self.faults),
            plan=self._plan,
            resized=is_smaller,
        )
        self._killed.clear()
        self._ranks.links.forget_phases()
        self._ranks.replace(gone, order, decision.spare if isinstance(decision, Replace) else "")
        self._ordered_at, self._lost_since, self._is_ready = time.monotonic(), None, False
