"""Python stacks of a rank's threads, taken from outside."""

import faulthandler
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from danlu.comm.flight_record import flight_path, stack_path

_SIGNAL = signal.SIGUSR2
_TIMEOUT = 0.5


def dump_stacks_on_signal(run: Path, rank: int) -> None:
    """Write the stacks of this process' threads when somebody asks; from C, so that it needs no lock of Python's."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND  # whoever reads it truncates it first
    descriptor = os.open(stack_path(run, rank), flags, 0o600)  # open as long as this process
    faulthandler.register(_SIGNAL, descriptor, all_threads=True, chain=False)


def read_stacks(run: Path, rank: int, pid: int) -> str:
    """The stacks of a rank's threads; empty if it cannot write them, as when it is stopped or dead."""
    path = stack_path(run, rank)
    if not _is_rank(run, rank, pid):
        return ""
    with suppress(OSError):
        os.truncate(path, 0)
        os.kill(pid, _SIGNAL)
        deadline = time.monotonic() + _TIMEOUT
        while time.monotonic() < deadline and not path.stat().st_size:
            time.sleep(0.02)
        time.sleep(0.05)  # what is being written
        return path.read_text(errors="replace")
    return ""


def main_stack(stacks: str) -> list[str]:
    """The lines of the main thread, innermost first, without what started the rank."""
    blocks = [block.strip().splitlines() for block in stacks.split("\n\n")]
    found = next((block for block in blocks if any("in run_worker" in line for line in block)), [])
    end = next((number for number, line in enumerate(found) if "in run_worker" in line), 0)
    return [line.strip() for line in found[1:end]]


def _is_rank(run: Path, rank: int, pid: int) -> bool:
    """Whether the process still is that rank: it has its flight record open, and so takes the signal."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return False
    return str(flight_path(run, rank)) in maps
