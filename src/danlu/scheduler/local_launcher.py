"""The ranks of a run as processes on this machine."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from danlu.comm.launcher_link import RankLinks
from danlu.resilience.host_watch import HostWatch
from danlu.scheduler.launcher import LaunchProgress, LaunchResult, record_hang
from danlu.scheduler.rank_failure import count_oom_kills, describe_failure, log_tail, read_failure
from danlu.scheduler.rendezvous_file import rendezvous_file
from danlu.spec import RankFailureEvent, RunFolder
from danlu.spec.event import parse_known_events
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
        self, run: RunFolder, world: int, lock: RunLock | None = None, *, worker_options: Sequence[str] = ()
    ) -> None:
        """`worker_options` are passed to every rank's worker."""
        self.run, self.world_size, self.worker_options = run, world, tuple(worker_options)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.links = RankLinks()
        self.stop_requested = False
        self._lock = lock
        self._exit_stack = ExitStack()
        self._failed_rank: int | None = None
        self._deadline = float("inf")
        self._started_at = time.time()
        self._oom_kills = count_oom_kills()
        self._unwritten_failures: dict[int, RankFailureEvent] = {}
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._watch = HostWatch(run.path)

    def __enter__(self) -> Self:
        self.run.logs.mkdir(exist_ok=True)
        store = self._exit_stack.enter_context(rendezvous_file())
        self._exit_stack.callback(self.links.close)
        if threading.current_thread() is threading.main_thread():  # Python handles signals in no other
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._previous_handlers[number] = signal.signal(number, self._on_stop_signal)
        try:
            for rank in range(self.world_size):
                self.processes.append(self._start(rank, store))
        except OSError:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signal_all(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        self._exit_stack.close()
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _start(self, rank: int, store: str) -> "subprocess.Popen[bytes]":
        threads = max(1, len(os.sched_getaffinity(0)) // self.world_size)
        command = [sys.executable, "-m", "danlu.cli.worker", str(self.run.path), "--store", store]
        command += ["--rank", str(rank), "--world", str(self.world_size), "--local-rank", str(rank), "--locked"]
        command += self.worker_options
        with self.links.open_link() as link, self.log_path(rank).open("ab") as log:
            command += ["--single-host-threads", str(threads), "--launcher-link", str(link.fileno())]
            inherited = (link.fileno(), *([self._lock.descriptor] if self._lock else ()))
            # A new session: signals from the terminal reach the ranks only through `_on_stop_signal`. No input: a
            # library that asks for a password there would wait forever.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=inherited,
            )

    def log_path(self, rank: int) -> Path:
        """The log file of a rank."""
        return self.run.logs / f"rank-{rank}.log"

    def poll(self) -> LaunchProgress:
        """Look at the ranks; those that wait for a failed one are killed after a while."""
        is_running = any(process.poll() is None for process in self.processes)
        if is_running and any(process.poll() for process in self.processes):
            self._deadline = min(self._deadline, time.monotonic() + _GRACE_PERIOD)
            if time.monotonic() > self._deadline:
                self._failed_rank = self.failed_rank  # before the others are killed, which is not their own failure
                self._signal_all(signal.SIGKILL)
        unwritten = self.links.poll_events()
        for event in parse_known_events(unwritten):
            if isinstance(event, RankFailureEvent):
                self._unwritten_failures[event.rank] = event
        if (hang := self._watch.look()) is not None:
            record_hang(self.run, hang, self._watch.watch.quiet)
        return LaunchProgress(is_running, self.links.slowest_phase, tuple(unwritten))

    @property
    def failed_rank(self) -> int | None:
        """A rank killed by a signal from outside, or the first to report a failure; None if none failed."""
        if self._failed_rank is not None:
            return self._failed_rank
        failed = [rank for rank, process in enumerate(self.processes) if process.poll()]
        return min(failed, key=self._failure_key, default=None)

    def _failure_key(self, rank: int) -> tuple[bool, float, int]:
        failure = self._failure(rank)
        return self.processes[rank].returncode > 0, failure.time if failure else float("inf"), rank

    def _failure(self, rank: int) -> RankFailureEvent | None:
        """What a rank of this launch reported about its failure."""
        pid = self.processes[rank].pid
        return self._unwritten_failures.get(rank) or read_failure(self.run, rank, since=self._started_at, pid=pid)

    def result(self) -> LaunchResult:
        """Which rank failed first and why, with the end of its log."""
        rank = self.failed_rank
        if rank is None:
            return LaunchResult()
        code = self.processes[rank].returncode
        if self.stop_requested and code < 0:
            return LaunchResult(exit_code=1, killed_on_request=True)
        try:
            log = self.log_path(rank).read_text(errors="replace")
        except OSError as error:
            log = f"its log cannot be read: {error}"
        failure = self._failure(rank)
        message = describe_failure(rank, code, failure, log, self._oom_kills)
        return LaunchResult(1, message, self.log_path(rank), tuple(log_tail(failure, log)))

    def stop(self, *, now: bool = False) -> None:
        """Stop the ranks after their step, with a checkpoint; `now` kills them."""
        self.stop_requested = True
        self._signal_all(signal.SIGKILL if now else signal.SIGTERM)

    def _on_stop_signal(self, _number: int, _frame: Any) -> None:
        self.stop(now=self.stop_requested)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)
