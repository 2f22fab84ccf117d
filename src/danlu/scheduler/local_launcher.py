"""The ranks of a run as processes on this machine, forked from one that has imported torch."""

import signal
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from danlu.comm.flight_record import read_flights, remove_flights, remove_snapshots
from danlu.comm.launcher_link import RankLinks, RegroupOrder
from danlu.resilience.host_watch import HostWatch
from danlu.resilience.policy import Means
from danlu.scheduler.fork_server import RankProcess
from danlu.scheduler.host_ranks import HostRanks
from danlu.scheduler.launcher import LaunchProgress, LaunchResult
from danlu.scheduler.rank_failure import log_tail
from danlu.scheduler.recovery import Recovery
from danlu.scheduler.rendezvous_file import rendezvous_file
from danlu.spec import RankFailureEvent, RunFolder
from danlu.storage.run_lock import RunLock

_GRACE_PERIOD = 30.0
"""Seconds the other ranks have to exit after one has failed."""


class LocalLauncher:
    """A `Launcher` of one process per rank; on exit of the context no rank is left running.

    In the main thread SIGINT, SIGTERM or SIGHUP stops the ranks after their step; a second one kills them. They inherit
    the run's lock, so that it is held until the last of them exits, and a link through which they detect the exit of
    this process: then they stop as after SIGTERM.
    """

    poll_seconds = 0.1

    def __init__(
        self,
        run: RunFolder,
        world: int,
        lock: RunLock | None = None,
        *,
        worker_options: Sequence[str] = (),
        restarts: int = 0,
    ) -> None:
        """`worker_options` are passed to every rank's worker.

        Ranks that die or hang are replaced, up to `restarts` times without a new step between.
        """
        self.run, self.world_size = run, world
        self._ranks = HostRanks(
            run,
            world,
            (*worker_options, *(["--recoverable"] if restarts else [])),
            ranks_per_host=world,
            inherited=[lock.descriptor] if lock else (),
        )
        self.stop_requested = False
        self._exit_stack = ExitStack()
        self._failed_rank: int | None = None
        self._deadline = float("inf")
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._store = ""
        self.watch, self.means = HostWatch(run.path), Means()
        self._recovery = Recovery(self, restarts)

    def __enter__(self) -> Self:
        self.run.logs.mkdir(exist_ok=True)
        remove_flights(self.run.path)  # and with them the states that an earlier launch left in memory
        self._exit_stack.callback(remove_snapshots, self.run.path)
        self._store = self._exit_stack.enter_context(rendezvous_file())
        if threading.current_thread() is threading.main_thread():  # Python handles signals in no other
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._previous_handlers[number] = signal.signal(number, self._on_stop_signal)
        try:
            for rank in range(self.world_size):
                self._ranks.start(rank, rank, self._store)
        except OSError:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ranks.close()
        self._exit_stack.close()
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def endpoint_of(self, generation: int) -> str:
        """Where the ranks of a world meet: each has its own, so that nobody who is late finds the others."""
        return f"{self._store}-{generation}"

    @property
    def furthest_step(self) -> int:
        """Steps done by the rank that is furthest."""
        return max((flight.step for flight in read_flights(self.run.path, collectives=False)), default=0)

    def lost_host(self, rank: int) -> str:
        """Of a rank that is lost with its host: this host is there."""
        return ""

    def replace(self, ranks: Sequence[int], order: RegroupOrder, host: str = "") -> None:
        """Start new processes in the place of ranks that have ended, and order the others to join them."""
        for rank in range(self.world_size):
            if rank not in ranks:
                self.links.order(rank, order)
        for rank in ranks:
            self._ranks.start(rank, rank, self._store, order)

    def poll(self) -> LaunchProgress:
        """Look at the ranks; lost ones are replaced, or else those that wait for them are killed after a while."""
        unwritten = self._ranks.poll_events()
        self._recovery.look(recover=not self.stop_requested)
        is_running = any(process.poll() is None for process in self.processes)
        if not any(process.poll() for process in self.processes):
            self._deadline = float("inf")  # who had failed was replaced
        elif is_running:
            self._deadline = min(self._deadline, time.monotonic() + _GRACE_PERIOD)
            if time.monotonic() > self._deadline:
                self._failed_rank = self.failed_rank  # before the others are killed, which is not their own failure
                self._ranks.signal_all(signal.SIGKILL)
        return LaunchProgress(is_running, self._phase, tuple(unwritten))

    @property
    def processes(self) -> list[RankProcess]:
        """Of every rank."""
        return [self._ranks.processes[rank] for rank in range(self.world_size)]

    def log_path(self, rank: int) -> Path:
        """The log file of a rank."""
        return self._ranks.log_path(rank)

    @property
    def links(self) -> RankLinks:
        """What ranks report, and how they are reached."""
        return self._ranks.links

    @property
    def fork_server_pid(self) -> int:
        """The process that forks the ranks."""
        return self._ranks.fork_server_pid

    @property
    def _phase(self) -> str:
        return "importing torch" if self.is_importing else self.links.slowest_phase

    @property
    def is_importing(self) -> bool:
        """Whether new ranks still wait for torch to be imported."""
        return self._ranks.is_importing

    def wait(self) -> None:
        """Return after a moment, or sooner if a rank has ended."""
        self._ranks.wait(self.poll_seconds)

    @property
    def failed_rank(self) -> int | None:
        """A rank killed by a signal from outside, or the first to report a failure; None if none failed."""
        if self._failed_rank is not None:
            return self._failed_rank
        failed = [rank for rank, process in enumerate(self.processes) if process.poll()]
        return min(failed, key=self._failure_key, default=None)

    def _failure_key(self, rank: int) -> tuple[bool, float, int]:
        failure = self.failure(rank)
        return self.exit_code(rank) > 0, failure.time if failure else float("inf"), rank

    def exit_code(self, rank: int) -> int:
        """Of a rank that has ended."""
        code = self.processes[rank].returncode
        assert code is not None
        return code

    def failure(self, rank: int) -> RankFailureEvent | None:
        """What a rank of this launch reported about its failure."""
        return self._ranks.failure(rank)

    def result(self) -> LaunchResult:
        """Which rank failed first and why, with the end of its log."""
        rank = self.failed_rank
        if rank is None:
            return LaunchResult()
        if self.stop_requested and self.exit_code(rank) < 0:
            return LaunchResult(exit_code=1, killed_on_request=True)
        tail = tuple(log_tail(self.failure(rank), self._ranks.read_log(rank)))
        return LaunchResult(1, self._recovery.reason or self.describe(rank), self._ranks.log_path(rank), tail)

    def describe(self, rank: int) -> str:
        """Why a rank ended, in one line."""
        return self._ranks.describe(rank)

    def stop(self, *, now: bool = False) -> None:
        """Stop the ranks after their step, with a checkpoint; `now` kills them."""
        self.stop_requested = True
        self._ranks.signal_all(signal.SIGKILL if now else signal.SIGTERM)

    def _on_stop_signal(self, _number: int, _frame: Any) -> None:
        self.stop(now=self.stop_requested)
