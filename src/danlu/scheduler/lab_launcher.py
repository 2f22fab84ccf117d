"""The ranks of a run on the hosts of a network lab: the same agents and coordinator as on a cluster.

Every host is a machine of its own: network, processes, name and /dev/shm. What a lab cannot show is the speed of the
chips: all hosts share this machine's cores.
"""

import os
import signal
import subprocess
import sys
import time
from types import TracebackType
from typing import Self

from danlu.scheduler.launcher import EXIT_STOPPED, LaunchProgress, LaunchResult
from danlu.scheduler.network_lab import LabHost, NetworkLab
from danlu.scheduler.rank_failure import describe_reported, first_failure
from danlu.scheduler.rank_map import RankMap, write_ranks
from danlu.scheduler.sbatch_script import COORDINATORS
from danlu.spec import EndEvent, RunFolder

_STORE_PORT, _CONTROL_PORT = 29500, 29501
"""Nothing else listens on a lab's hosts."""
_POLL_SECONDS = 0.2
_LEAVE_SECONDS = 10.0


class LabLauncher:
    """A `Launcher` of ranks on a lab's hosts; on exit of the context no process is left there."""

    def __init__(self, run: RunFolder, lab: NetworkLab, nodes: int, ranks_per_node: int, spares: int = 0) -> None:
        self.run, self.lab = run, lab
        self.stop_requested = False
        names = [host.name for host in lab.hosts]
        address = lab.hosts[0].address
        self.ranks = RankMap(
            job=os.getpid(),
            restart=0,
            nodes=tuple(names[:nodes]),
            tasks_per_node=ranks_per_node,
            store=f"{address}:{_STORE_PORT}",
            spares=tuple(names[nodes : nodes + spares]),
            control=f"{address}:{_CONTROL_PORT}",
            remark=f'the order of lab "{lab.name}"',
        )
        self._started_at = time.time()
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._coordinators = 0
        self._agents: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        """Start the coordinator on the first host, and an agent on every one."""
        self.run.logs.mkdir(exist_ok=True)
        write_ranks(self.run.path, self.ranks)
        self._start_coordinator()
        for host in self.lab.hosts[: len(self.ranks.nodes) + len(self.ranks.spares)]:
            self._agents[host.name] = self._start(host, "slurm-agent", f"node-{host.name}.log")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        deadline = time.monotonic() + _LEAVE_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()) if kind is None else 0.0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _start_coordinator(self) -> None:
        self._coordinators += 1
        self._coordinator = self._start(self.lab.hosts[0], "slurm-coordinate", "job.log")

    @property
    def _processes(self) -> list[subprocess.Popen[bytes]]:
        return [*([self._coordinator] if self._coordinator else []), *self._agents.values()]

    def _start(self, host: LabHost, command: str, log: str) -> subprocess.Popen[bytes]:
        # They find out where they are from the same variables as under Slurm.
        place = ["env", f"SLURM_JOB_ID={self.ranks.job}", "SLURM_RESTART_COUNT=0", f"SLURMD_NODENAME={host.name}"]
        words = [*host.machine, *place, sys.executable, "-m", "danlu", command, str(self.run.path)]
        with (self.run.logs / log).open("ab") as output:
            return subprocess.Popen(words, stdout=output, stderr=output, stdin=subprocess.DEVNULL, process_group=0)

    def poll(self) -> LaunchProgress:
        """The run goes on while its coordinator does; one that is killed is replaced, and takes over."""
        assert self._coordinator is not None
        code = self._coordinator.poll()
        if code is not None and not 0 <= code < 128 and not self.stop_requested and self._coordinators < COORDINATORS:
            self._start_coordinator()
            return LaunchProgress(is_running=True, notices=("the coordinator was killed: another one takes over",))
        return LaunchProgress(is_running=code is None)

    def wait(self) -> None:
        """Return when it is time for the next `poll`."""
        time.sleep(_POLL_SECONDS)

    def stop(self, *, now: bool = False) -> None:
        """Stop the ranks after their step, with a checkpoint; `now` kills them."""
        self.stop_requested = True
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL if now else signal.SIGTERM)

    def result(self) -> LaunchResult:
        """How the coordinator ended, and why a rank failed if one did."""
        assert self._coordinator is not None
        code = self._coordinator.returncode
        *_, end = (None, *self.run.read_events())
        if isinstance(end, EndEvent) and end.outcome == "stopped" and end.time >= self._started_at:
            return LaunchResult(EXIT_STOPPED)
        if self.stop_requested and not 0 <= code < 128:
            return LaunchResult(1, killed_on_request=True)
        if not code:
            return LaunchResult()
        failure = first_failure(self.run, since=self._started_at)
        outcome = f'the coordinator on lab "{self.lab.name}" ended with exit code {code}'
        return LaunchResult(1, f"{describe_reported(failure)}; {outcome}" if failure else outcome, self.run.logs)
