"""The ranks of a run as processes on this machine."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from danlu.cli.rendezvous_file import rendezvous_file
from danlu.comm.launcher_link import RankLinks
from danlu.spec import RunFolder
from danlu.storage.run_lock import RunLock

_POLL_SECONDS = 0.1
_GRACE_PERIOD = 30.0
"""Seconds the other ranks have to exit after one has failed."""


class LocalLauncher:
    """One `danlu worker` per rank, as a context manager: on exit no rank is left running.

    SIGINT, SIGTERM or SIGHUP stops the ranks after their step; a second one kills them. They inherit the run's lock, so
    that it is held until the last of them exits, and a link through which they detect the exit of this process: then
    they stop as after SIGTERM.
    """

    def __init__(self, run: RunFolder, world: int, lock: RunLock | None = None) -> None:
        self.run, self.world_size = run, world
        self.processes: list[subprocess.Popen[bytes]] = []
        self.links = RankLinks()
        self._lock = lock
        self._exit_stack = ExitStack()
        self._stop_signals = 0
        self._failed_rank: int | None = None
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self.run.logs.mkdir(exist_ok=True)
        store = self._exit_stack.enter_context(rendezvous_file())
        self._exit_stack.callback(self.links.close)
        threads = max(1, len(os.sched_getaffinity(0)) // self.world_size)
        # Threads that spin instead of sleeping gain nothing measurable on an idle machine, and on a busy one (twice as
        # many processes as cores) made a run of one rank five times slower. The user's own settings take precedence.
        # Gloo listens on the interface of the host's name, which other hosts can reach; these ranks need only
        # loopback.
        environment = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": "lo"}
        environment |= os.environ
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._previous_handlers[number] = signal.signal(number, self._on_stop_signal)
        try:
            for rank in range(self.world_size):
                self.processes.append(self._start(rank, store, environment))
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

    def _start(self, rank: int, store: str, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "danlu", "worker", str(self.run.path), "--store", store]
        command += ["--rank", str(rank), "--world", str(self.world_size), "--local-rank", str(rank), "--locked"]
        with self.links.open_link() as link, self.log_path(rank).open("ab") as log:
            command += ["--launcher-link", str(link.fileno())]
            inherited = (link.fileno(), *([self._lock.descriptor] if self._lock else ()))
            # A new session: signals from the terminal reach the ranks only through `_on_stop_signal`.
            return subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True, pass_fds=inherited
            )

    def log_path(self, rank: int) -> Path:
        """The log file of a rank."""
        return self.run.logs / f"rank-{rank}.log"

    def wait(self, on_poll: Callable[[], None]) -> int | None:
        """Call `on_poll` regularly until all ranks have exited; the rank that failed first, or None."""
        deadline = float("inf")
        while any(process.poll() is None for process in self.processes):
            on_poll()
            time.sleep(_POLL_SECONDS)
            if deadline == float("inf") and any(process.poll() for process in self.processes):
                deadline = time.monotonic() + _GRACE_PERIOD
            if time.monotonic() > deadline:
                self._kill_stragglers()
        on_poll()
        return self._first_failed_rank()

    def _kill_stragglers(self) -> None:
        """Kill ranks that wait for a failed one; that signal is not their own failure."""
        self._failed_rank = self._first_failed_rank()
        self._signal_all(signal.SIGKILL)

    def _first_failed_rank(self) -> int | None:
        """A rank killed by a signal from outside, or the first to report a failure."""
        if self._failed_rank is not None:
            return self._failed_rank
        failed = [rank for rank, process in enumerate(self.processes) if process.poll()]
        return min(failed, key=self._failure_key, default=None)

    def _failure_key(self, rank: int) -> tuple[bool, float, int]:
        return self.processes[rank].returncode > 0, self._failed_at(rank), rank

    def _failed_at(self, rank: int) -> float:
        """When a rank reported its failure; infinity if it did not."""
        log = self.log_path(rank).read_text(errors="replace")
        times = re.findall(rf"^rank {rank} failed at ([0-9.]+):", log, re.MULTILINE)
        return float(times[-1]) if times else float("inf")

    @property
    def stop_requested(self) -> bool:
        """Whether a signal requested a stop."""
        return self._stop_signals > 0

    def _on_stop_signal(self, _number: int, _frame: Any) -> None:
        self._stop_signals += 1
        self._signal_all(signal.SIGTERM if self._stop_signals == 1 else signal.SIGKILL)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)
