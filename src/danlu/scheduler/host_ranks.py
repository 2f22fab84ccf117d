"""The ranks of a run on this host: their processes, forked from one that has imported torch, and the links to them."""

import os
import select
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from danlu.comm.launcher_link import RankLinks, RegroupOrder
from danlu.scheduler.fork_server import ForkServer, RankProcess
from danlu.scheduler.rank_failure import count_oom_kills, describe_failure, read_failure
from danlu.spec import RankFailureEvent, RunFolder
from danlu.spec.event import parse_known_events

LOOPBACK = "lo"


class HostRanks:
    """Starts ranks and knows how they ended; `close` leaves none running."""

    def __init__(
        self,
        run: RunFolder,
        world_size: int,
        worker_options: Sequence[str] = (),
        *,
        ranks_per_host: int,
        interface: str = LOOPBACK,
        inherited: Sequence[int] = (),
    ) -> None:
        """Ranks of a world of this size connect over `interface`, and keep the `inherited` descriptors open."""
        self.run, self.world_size, self.worker_options = run, world_size, tuple(worker_options)
        self.processes: dict[int, RankProcess] = {}
        self.links = RankLinks()
        self._threads = max(1, len(os.sched_getaffinity(0)) // ranks_per_host)
        self._interface, self._inherited = interface, inherited
        self._fork_servers: list[ForkServer] = []
        self._started_at = time.time()
        self._oom_kills = count_oom_kills()
        self._unwritten_failures: dict[int, RankFailureEvent] = {}

    def start(self, rank: int, local_rank: int, endpoint: str, order: RegroupOrder | None = None) -> None:
        """Start a rank, in place of any that it had here; it meets the others at `endpoint`, or where `order` says."""
        self.warm_up(self.log_path(rank))
        arguments = [str(self.run.path), "--store", endpoint, "--locked", *self.worker_options]
        arguments += ["--rank", str(rank), "--world", str(self.world_size), "--local-rank", str(local_rank)]
        arguments += ["--order", order.to_json()] if order else []
        with self.links.open_link(rank) as link, self.log_path(rank).open("ab") as log:
            done = partial(self.links.is_done, rank)
            self.processes[rank] = self._fork_server.fork(
                arguments, log.fileno(), link.fileno(), *self._inherited, is_done=done
            )

    def forget(self) -> None:
        """Forget ranks that have ended: others take their numbers, perhaps elsewhere."""
        self.processes = {rank: process for rank, process in self.processes.items() if process.poll() is None}
        self.links.close()
        self.links = RankLinks()

    def warm_up(self, output: Path) -> None:
        """Have a process that has imported torch, so that ranks start sooner; what it prints is appended to a file."""
        if not self._fork_servers or not self._fork_server.is_alive:
            with output.open("ab") as log:
                self._fork_servers.append(ForkServer(self._threads, log, self._interface))

    @property
    def _fork_server(self) -> ForkServer:
        return self._fork_servers[-1]

    @property
    def fork_server_pid(self) -> int:
        """The process that forks the ranks."""
        return self._fork_server.pid

    @property
    def is_importing(self) -> bool:
        """Whether new ranks still wait for torch to be imported."""
        return bool(self._fork_servers) and not self._fork_server.is_ready

    def poll_events(self) -> list[str]:
        """Events that ranks could not write to disk, as JSON."""
        unwritten = self.links.poll_events()
        for event in parse_known_events(unwritten):
            if isinstance(event, RankFailureEvent):
                self._unwritten_failures[event.rank] = event
        return unwritten

    def wait(self, seconds: float) -> None:
        """Return after so long, or sooner if a rank has ended."""
        if self._fork_servers and self._fork_server.is_alive:
            select.select([self._fork_server], [], [], seconds)
        else:
            time.sleep(seconds)

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to every rank that runs."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(number)

    def close(self) -> None:
        """Kill what still runs."""
        self.signal_all(signal.SIGKILL)
        for process in self.processes.values():
            process.wait()
        for server in self._fork_servers:
            server.close()
        self.links.close()

    def log_path(self, rank: int) -> Path:
        """The log file of a rank."""
        return self.run.logs / f"rank-{rank}.log"

    def read_log(self, rank: int) -> str:
        """What a rank printed."""
        try:
            return self.log_path(rank).read_text(errors="replace")
        except OSError as error:
            return f"its log cannot be read: {error}"

    def failure(self, rank: int) -> RankFailureEvent | None:
        """What a rank reported about its failure."""
        pid = self.processes[rank].pid
        return self._unwritten_failures.get(rank) or read_failure(self.run, rank, since=self._started_at, pid=pid)

    def describe(self, rank: int) -> str:
        """Why a rank ended, in one line."""
        code = self.processes[rank].returncode
        assert code is not None
        return describe_failure(rank, code, self.failure(rank), self.read_log(rank), self._oom_kills)
