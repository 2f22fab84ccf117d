"""The ranks of a run as processes of this machine."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from danlu.spec import RunFolder

_LOOK_EVERY = 0.1
_PATIENCE = 30.0
"""Seconds the other ranks get to end after one has failed."""


class LocalRanks:
    """One `danlu worker` a rank, as a context: when it is left, no rank is left running.

    An interrupt, termination or hang-up asks the ranks to stop after their step; a second one ends them.
    """

    def __init__(self, run: RunFolder, world: int) -> None:
        self.run, self.world = run, world
        self.processes: list[subprocess.Popen[bytes]] = []
        self._asked = 0
        self._blamed: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self.run.logs.mkdir(exist_ok=True)
        store = f"127.0.0.1:{_free_port()}"
        threads = max(1, len(os.sched_getaffinity(0)) // self.world)
        # Threads that wait in a loop instead of asleep gain nothing measurable on a quiet machine, and on a busy one
        # (twice as many processes as cores) made a run of one rank five times slower. What the user set stays.
        environment = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._ask_to_stop)
        try:
            for rank in range(self.world):
                self.processes.append(self._start(rank, store, environment))
        except OSError:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._send(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _start(self, rank: int, store: str, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "danlu", "worker", str(self.run.path), "--store", store]
        command += ["--rank", str(rank), "--world", str(self.world), "--local-rank", str(rank)]
        with self.log(rank).open("ab") as log:
            # A session of its own: what is typed at the terminal reaches the ranks through `_ask_to_stop` alone.
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def log(self, rank: int) -> Path:
        """What a rank said."""
        return self.run.logs / f"rank-{rank}.log"

    def wait(self, look: Callable[[], None]) -> int | None:
        """Call `look` now and then until all ranks have ended; the rank to blame if one failed, or None."""
        deadline = float("inf")
        while any(process.poll() is None for process in self.processes):
            look()
            time.sleep(_LOOK_EVERY)
            if deadline == float("inf") and any(process.poll() for process in self.processes):
                deadline = time.monotonic() + _PATIENCE
            if time.monotonic() > deadline:
                self._end_late_ranks()
        look()
        return self._culprit()

    def _end_late_ranks(self) -> None:
        """End ranks that wait for one that will not come; what they are ended with is not their own failure."""
        self._blamed = self._culprit()
        self._send(signal.SIGKILL)

    def _culprit(self) -> int | None:
        """A rank ended by a signal from outside, or the one that said first that it failed."""
        if self._blamed is not None:
            return self._blamed
        failed = [rank for rank, process in enumerate(self.processes) if process.poll()]
        return min(failed, key=self._blame, default=None)

    def _blame(self, rank: int) -> tuple[bool, float, int]:
        return self.processes[rank].returncode > 0, self._failed_at(rank), rank

    def _failed_at(self, rank: int) -> float:
        """When a rank said that it failed; never, if it did not."""
        said = self.log(rank).read_text(errors="replace")
        times = re.findall(rf"^rank {rank} failed at ([0-9.]+):", said, re.MULTILINE)
        return float(times[-1]) if times else float("inf")

    def _ask_to_stop(self, _number: int, _frame: Any) -> None:
        self._asked += 1
        self._send(signal.SIGTERM if self._asked == 1 else signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
