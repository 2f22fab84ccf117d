"""Why a rank failed: from its log, or from the kernel's counters if it was killed."""

import re
import signal
from pathlib import Path

_TAIL_LINES = 12


def count_oom_kills() -> int | None:
    """Processes killed by the kernel's OOM killer, in this process's cgroup or on this machine."""
    for file in (*_cgroup_event_files(), Path("/proc/vmstat")):
        try:
            found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return int(found[1])
    return None


def _cgroup_event_files() -> list[Path]:
    """Counter files of this process's cgroup; inside a container that is the root of the tree."""
    try:
        own = [line.rpartition(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        own = []
    folders = [Path("/sys/fs/cgroup") / group.lstrip("/") for group in own] + [Path("/sys/fs/cgroup")]
    return [folder / "memory.events" for folder in folders]


def describe_failure(rank: int, code: int, log: str, kills_before: int | None) -> str:
    """Why a rank exited with `code`, from its log and from the number of OOM kills before it started."""
    if code < 0:
        name = _signal_name(-code)
        return f"rank {rank} was killed by {name}{_oom_text(kills_before) if -code == signal.SIGKILL else ''}"
    failures = re.findall(rf"^rank {rank} failed at [0-9.]+: (.*)$", log, re.MULTILINE)
    if failures:
        return f"rank {rank} failed: {failures[-1]}"
    last = next((line for line in reversed(log.splitlines()) if line.strip()), "no output")
    return f"rank {rank} ended with exit code {code}: {last.strip()}"


def log_tail(rank: int, log: str) -> list[str]:
    """The end of a rank's log, unless one of Danlu's own errors already explains the failure in one line."""
    if re.search(rf"^rank {rank} failed at [0-9.]+: (?![A-Z]\w*(Error|Exception|Interrupt)?: )", log, re.MULTILINE):
        return []
    return log.splitlines()[-_TAIL_LINES:]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _oom_text(kills_before: int | None) -> str:
    now = count_oom_kills()
    if now is None or kills_before is None:
        return " (out of memory? no OOM counter here)"
    if count := now - kills_before:
        return (
            f": out of memory; the kernel's OOM killer ended {count} process{'es' * (count > 1)} since the run began; "
            "fewer sequences at once (`microbatches`), more ranks, or `recompute` in the plan need less memory"
        )
    return "; not out of memory, by the kernel's OOM counter: another user or program killed it"
