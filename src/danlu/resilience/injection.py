"""Inject faults into a running run of this host: signals from outside, and requests that a rank carries out itself.

A rehearsal: what a run survives here, it survives when nobody asked for it. Only the user of a run can do it, who alone
can signal its processes and write into its folder in memory.
"""

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

from danlu.comm.flight_record import flight_folder, read_flights
from danlu.resilience.process_state import read_process_state
from danlu.spec.fault_mix import InjectedFault

_SIGNALS: dict[InjectedFault, signal.Signals] = {
    "kill": signal.SIGKILL,
    "segfault": signal.SIGSEGV,
    "abort": signal.SIGABRT,
    "preempt": signal.SIGTERM,
    "stop": signal.SIGSTOP,
}


class InjectionError(RuntimeError):
    """A fault cannot be injected; the message says why."""


def inject(run: Path, fault: InjectedFault, rank: int) -> None:
    """Let a fault happen to one rank of a run on this host, now or in its next step."""
    pids = {flight.rank: flight.pid for flight in read_flights(run, collectives=False)}
    if rank not in pids:
        known = f"ranks {min(pids)} to {max(pids)}" if pids else "none of its ranks"
        raise InjectionError(f"rank must be one that runs on this host, but is {rank}; {known} run here")
    try:
        if fault == "host":
            _end_host(pids)
        elif fault in _SIGNALS:
            os.kill(pids[rank], _SIGNALS[fault])
        else:
            _leave_request(run, fault, rank)
    except ProcessLookupError:
        raise InjectionError(f"rank {rank} has just ended by itself") from None
    except PermissionError:
        raise InjectionError(f"rank {rank} is another user's process") from None


def take_request(run: Path, rank: int) -> InjectedFault | None:
    """The fault that this rank is asked to carry out, if any."""
    path = _request_path(run, rank)
    if not path.exists():
        return None
    fault: InjectedFault = json.loads(path.read_text())["fault"]
    path.unlink()
    return fault


def _end_host(pids: dict[int, int]) -> None:
    """What a host without power does: every process of the run ends at the same time, the one that forks them too."""
    parents = {read_process_state(pid).parent for pid in pids.values()}
    for pid in (*filter(_is_fork_server, parents), *pids.values()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_fork_server(pid: int) -> bool:
    """Ranks whose parent has ended belong to somebody else, such as the first process of the host."""
    with suppress(OSError):
        return b"danlu.cli.fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _leave_request(run: Path, fault: InjectedFault, rank: int) -> None:
    path = _request_path(run, rank)
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"fault": fault}))
    new.rename(path)


def _request_path(run: Path, rank: int) -> Path:
    return flight_folder(run) / f"rank-{rank}.fault"
