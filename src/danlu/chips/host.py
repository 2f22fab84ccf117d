"""The host as this process may use it: cores, memory, caches, name. Read from /proc and /sys on Linux.

Most functions take the root of the file system, so that a test can simulate another machine. On systems
without /proc and /sys the values come from Python's `os` and `resource` where they have them.
"""

import os
import platform
import re
import resource
import sys
from pathlib import Path

_ROOT = Path("/")
_SIZES = {"K": 1024, "M": 1024**2, "G": 1024**3}


def cpu_name(root: Path = _ROOT) -> str:
    """The vendor's name of the processor, or the architecture if the system does not report it."""
    match = re.search(r"^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def physical_cores(root: Path = _ROOT, usable: set[int] | None = None) -> int:
    """Cores this process may run on, hyper-threads of one core counted once, within the container's quota."""
    threads = _affinity() if usable is None else usable
    siblings = {_siblings(root, thread) for thread in threads}
    quota = _quota(root)
    return len(siblings) if quota is None else max(1, min(len(siblings), int(quota)))


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _siblings(root: Path, thread: int) -> str:
    topology = root / f"sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list"
    return _text(topology).strip() or str(thread)


def _quota(root: Path) -> float | None:
    """Cores that the cgroup allows, as a fraction; None without a limit."""
    limit, _, period = _text(root / "sys/fs/cgroup/cpu.max").strip().partition(" ")
    return int(limit) / int(period) if limit.isdigit() and period.isdigit() else None


def load_per_core() -> float:
    """Runnable processes per usable core over the last minute."""
    return os.getloadavg()[0] / physical_cores()


def memory_total(root: Path = _ROOT) -> int:
    """Bytes of memory this process may use: the machine's, or its container's if that is less."""
    found = re.search(r"^MemTotal:\s+(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    total = int(found[1]) * 1024 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _text(root / "sys/fs/cgroup/memory.max").strip()
    return min(total, int(limit)) if limit.isdigit() else total


def peak_resident_memory() -> int:
    """Peak bytes of memory this process has held.

    On Linux `ru_maxrss` is inherited through fork and exec, so a small child of a large parent would report the
    parent's peak; the high-water mark in /proc is the process's own.
    """
    if own := re.search(r"^VmHWM:\s+(\d+) kB$", _text(_ROOT / "proc/self/status"), re.MULTILINE):
        return int(own[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def last_level_cache(root: Path = _ROOT) -> int:
    """Bytes of the largest cache of the first core; 0 if the system does not report it."""
    files = (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = [re.fullmatch(r"(\d+)([KMG])", _text(file).strip()) for file in files]
    return max((int(size[1]) * _SIZES[size[2]] for size in sizes if size), default=0)


def _text(path: Path) -> str:
    """A system file's text; empty if this system or container has no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
