"""The ranks of a run as processes of this machine."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from danlu.spec import RunFolder

_LOOK_EVERY = 0.1
_PATIENCE = 30.0
"""Seconds the other ranks get to end after one has failed."""


class LocalRanks:
    """Starts one `danlu worker` a rank and watches over them: when one fails, the others are ended too."""

    def __init__(self, run: RunFolder, world: int) -> None:
        self.run, self.world = run, world
        run.logs.mkdir(exist_ok=True)
        store = f"127.0.0.1:{_free_port()}"
        threads = max(1, len(os.sched_getaffinity(0)) // world)
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        self.processes = [self._start(rank, store, environment) for rank in range(world)]

    def _start(self, rank: int, store: str, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "danlu", "worker", str(self.run.path), "--store", store]
        command += ["--rank", str(rank), "--world", str(self.world), "--local-rank", str(rank)]
        with self.log(rank).open("ab") as log:
            # A session of its own: an interrupt typed at the terminal reaches the ranks through `wait` alone.
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def log(self, rank: int) -> Path:
        """What a rank said."""
        return self.run.logs / f"rank-{rank}.log"

    def wait(self, look: Callable[[], None]) -> int | None:
        """Call `look` now and then until all ranks have ended; the first rank that failed, or None."""
        interrupts, failed, deadline = 0, None, float("inf")
        while any(process.poll() is None for process in self.processes):
            try:
                look()
                time.sleep(_LOOK_EVERY)
            except KeyboardInterrupt:
                interrupts += 1
                self._send(signal.SIGTERM if interrupts == 1 else signal.SIGKILL)
            if failed is None and (failed := self._failed()) is not None:
                deadline = time.monotonic() + _PATIENCE
            if time.monotonic() > deadline:
                self._send(signal.SIGKILL)
        look()
        return self._failed() if failed is None else failed

    def _failed(self) -> int | None:
        """The rank to blame: one ended by a signal before those that only lost their connection to it."""
        failed = [rank for rank, process in enumerate(self.processes) if process.poll()]
        return min(failed, key=lambda rank: (self.processes[rank].returncode > 0, rank), default=None)

    def _send(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
