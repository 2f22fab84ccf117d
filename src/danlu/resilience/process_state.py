"""What the kernel says about a process on this host."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessState:
    """Of one process at one moment."""

    alive: bool
    runnable: bool = False
    """It computes, or waits for a core."""
    stopped: bool = False
    """By a signal, or by a debugger."""
    in_uninterruptible_wait: bool = False
    """It waits for a disk or a file system that does not answer."""
    cpu_seconds: float = 0.0
    """Of all its threads so far."""
    parent: int = 0
    """Process id of its parent."""


def read_process_state(pid: int) -> ProcessState:
    """The state of a process; a zombie is not alive."""
    try:
        raw = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ProcessState(alive=False)
    fields = raw.rpartition(")")[2].split()  # a program's name may have spaces and parentheses
    state, ticks = fields[0], int(fields[11]) + int(fields[12])
    return ProcessState(
        alive=state not in "ZXx",
        runnable=state == "R",
        stopped=state in "Tt",
        in_uninterruptible_wait=state == "D",
        cpu_seconds=ticks / os.sysconf("SC_CLK_TCK"),
        parent=int(fields[1]),
    )
