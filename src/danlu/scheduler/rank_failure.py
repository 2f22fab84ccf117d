"""Why a rank failed: as it reported itself, or from its exit code and the kernel's counters if it could not."""

import re
import signal
from contextlib import suppress
from pathlib import Path

from danlu.spec import RankFailureEvent, RunFolder

UNKNOWN_EXIT = 255
"""Exit code of a rank whose parent, which alone is told it, is gone too."""
_TAIL_LINES = 12


def read_failure(run: RunFolder, rank: int, since: float, pid: int | None = None) -> RankFailureEvent | None:
    """The newest failure that a rank reported after `since`, as the process `pid` if given; None if it reported none.

    Times are those of the rank's own clock.
    """
    newest = None
    with suppress(OSError, ValueError):  # an unreadable file reports nothing: then the rank's log is quoted
        for event in run.read_rank_events(rank):
            if isinstance(event, RankFailureEvent) and event.time >= since and pid in (None, event.pid):
                newest = event
    return newest


def first_failure(run: RunFolder, since: float) -> RankFailureEvent | None:
    """The earliest failure that any rank reported after `since`: the other ranks fail because of that one.

    The clocks of hosts may differ, and with them the order of failures within that difference.
    """
    ranks = [int(path.stem.removeprefix("rank-")) for path in run.rank_events(0).parent.glob("rank-[0-9]*.jsonl")]
    failures = [found for rank in ranks if (found := read_failure(run, rank, since)) is not None]
    return min(failures, key=lambda failure: failure.time, default=None)


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


def describe_failure(rank: int, code: int, failure: RankFailureEvent | None, log: str, kills_before: int | None) -> str:
    """Why a rank exited with `code`: its own report, its log, or the number of OOM kills before it started."""
    if code < 0:
        name = _signal_name(-code)
        return f"rank {rank} was killed by {name}{_oom_text(kills_before) if -code == signal.SIGKILL else ''}"
    if failure is not None:
        return describe_reported(failure)
    if code == UNKNOWN_EXIT:
        return f"rank {rank} ended, and so did the process that forked it"
    last = next((line for line in reversed(log.splitlines()) if line.strip()), "no output")
    return f"rank {rank} ended with exit code {code}: {last.strip()}"


def describe_reported(failure: RankFailureEvent) -> str:
    """A failure in the rank's own words; errors of others are given with their type."""
    return f"rank {failure.rank} failed: {'' if failure.explained else f'{failure.error}: '}{failure.message}"


def log_tail(failure: RankFailureEvent | None, log: str) -> list[str]:
    """The end of a rank's log, unless one of Danlu's own errors already explains the failure in one line."""
    return [] if failure is not None and failure.explained else log.splitlines()[-_TAIL_LINES:]


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
