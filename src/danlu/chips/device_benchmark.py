"""Measure one device: matmuls, memory, and the disk of its host."""

import errno
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from danlu.chips import host
from danlu.spec.cluster import Dtype

BENCHMARK_DTYPES: dict[Dtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
"""Dtypes in which a plain matmul is measured. Not fp8: it needs scales, and a CPU that emulates it takes minutes."""

_MATMUL_SIZES = (256, 512, 1024, 2048, 4096, 8192)
_ROUNDS = 4
_BLOCK = 8 * 2**20
# O_DIRECT requires addresses, offsets and lengths in full sectors; a page is a multiple of any sector in use.
_O_DIRECT = getattr(os, "O_DIRECT", 0)


class MeasurementError(Exception):
    """Something could not be measured; the message says why."""


def measure_matmul_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """FLOP/s of square matmuls at the best size: the best of several rounds, which take half of `seconds`.

    Uses the threads the caller has set. The other half finds the size: sizes grow while one matmul still
    fits, so that a dtype the device only emulates takes no longer than a native one. Other work on the machine
    only ever lowers a rate, hence the best round and not the mean.
    """
    side = best_matmul_size(device, dtype, seconds / 2)
    return max(matmul_flops(device, dtype, side, seconds / 2 / _ROUNDS) for _ in range(_ROUNDS))


def best_matmul_size(device: torch.device, dtype: torch.dtype, seconds: float) -> int:
    """The size of the fastest square matmul, of those that fit in so many seconds."""
    best, found = 0.0, _MATMUL_SIZES[0]
    deadline = time.perf_counter() + seconds
    for side in _MATMUL_SIZES:
        rate = matmul_flops(device, dtype, side, seconds / 8)
        if rate > best:
            best, found = rate, side
        next_product = 2 * (2 * side) ** 3 / rate
        if time.perf_counter() + 2 * next_product > deadline:
            break
    return found


def matmul_flops(device: torch.device, dtype: torch.dtype, side: int, seconds: float) -> float:
    """FLOP/s of square matmuls, over about so many seconds."""
    try:
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        product = left @ right
    except (RuntimeError, NotImplementedError) as error:
        name = str(dtype).removeprefix("torch.")
        reason = str(error).splitlines()[0]
        raise MeasurementError(f"a {name} matmul of {side}×{side} does not run on {device}: {reason}") from None
    return 2 * side**3 / _mean_seconds(lambda: torch.matmul(left, right, out=product), device, seconds)


def measure_memory_bandwidth(device: torch.device, seconds: float = 0.5, sharers: int = 1) -> float:
    """Bytes per second of a large copy, read and written bytes both counted.

    `sharers` processes that measure at once share the host's last-level cache, and their buffers are sized to
    overflow it together.
    """
    size = 256 * 2**20
    if device.type == "cpu":
        size = max(64 * 2**20, host.last_level_cache() // sharers)  # two buffers: twice the cache in total
        size = min(size, host.memory_total() // (16 * sharers))
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)  # written once, so that no page fault falls into the timed part
    return 2 * size / _mean_seconds(lambda: target.copy_(source), device, seconds)


def _mean_seconds(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Mean seconds of `run`, repeated for about `seconds` after one warm-up run."""
    run()
    once = _batch_seconds(run, device, 1)
    # One synchronization per batch: it costs an accelerator more than a small kernel does. Several batches, because
    # on a busy machine one timed run says little about the next.
    batch = max(1, int(seconds / 8 / max(once, 1e-7)))
    repeats, elapsed = 0, 0.0
    while elapsed < seconds:
        elapsed += batch * _batch_seconds(run, device, batch)
        repeats += batch
    return elapsed / repeats


def median_seconds(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of `run` when repeated: the median of up to five rounds within `seconds`, each a mean.

    A mean inside a round, because ranks that share a core take turns of milliseconds; a median over rounds, because
    other work on the machine comes and goes. Two rounds at least, however long a run takes.
    """
    run()
    once = _batch_seconds(run, device, 1)
    batch = max(1, int(seconds / 5 / max(once, 1e-7)))
    rounds = max(2, min(5, int(seconds / max(once, 1e-7))))
    return statistics.median(_batch_seconds(run, device, batch) for _ in range(rounds))


def _batch_seconds(run: Callable[[], object], device: torch.device, batch: int) -> float:
    """Mean seconds of `run` over so many runs, with one synchronization at the end."""
    synchronize = torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    synchronize()
    start = time.perf_counter()
    for _ in range(batch):
        run()
    synchronize()
    return (time.perf_counter() - start) / batch


@dataclass(frozen=True)
class DiskSpeed:
    """How fast a folder's disk reads and writes one large file."""

    read: float
    write: float
    free: int
    """Bytes free in the folder's file system."""
    used_direct_io: bool
    """True when the page cache was bypassed; otherwise writes end with fsync and reads may come from the cache."""

    @property
    def method(self) -> str:
        """How it was measured."""
        return (
            "direct I/O"
            if self.used_direct_io
            else "buffered I/O, fsync after the write; the read may come from memory"
        )


def measure_disk_speed(folder: Path, size: int = 256 * 2**20, seconds: float = 2.0) -> DiskSpeed:
    """Write and read a file of at most `size` bytes in `folder`, for at most `seconds` each; the file is removed."""
    free = shutil.disk_usage(folder).free
    if free < 2 * size:
        needed = f"{2 * size / 1e6:.0f} MB are needed to measure its disk"
        raise MeasurementError(f"{folder} has {free / 1e6:.0f} MB free, but {needed}")
    handle, name = tempfile.mkstemp(prefix="danlu-probe-", dir=folder)
    os.close(handle)
    path = Path(name)
    try:
        direct = _supports_direct_io(path)
        write = _write_rate(path, size, seconds, direct)
        read = _read_rate(path, seconds, direct)
    finally:
        path.unlink()
    return DiskSpeed(read, write, free, direct)


def _supports_direct_io(path: Path) -> bool:
    """Whether this file system supports direct I/O; tmpfs and some overlays do not."""
    if not _O_DIRECT:
        return False
    try:
        os.close(os.open(path, os.O_WRONLY | _O_DIRECT))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _write_rate(path: Path, size: int, seconds: float, direct: bool) -> float:
    with mmap.mmap(-1, _BLOCK) as block:  # page-aligned, as direct I/O requires
        block.write(os.urandom(_BLOCK))  # a disk that compresses gains nothing
        file = os.open(path, os.O_WRONLY | (_O_DIRECT if direct else 0))
        try:
            start = time.perf_counter()
            written = 0
            while written < size and time.perf_counter() - start < seconds:
                written += os.write(file, block)
            os.fsync(file)
            return written / (time.perf_counter() - start)
        finally:
            os.close(file)


def _read_rate(path: Path, seconds: float, direct: bool) -> float:
    with mmap.mmap(-1, _BLOCK) as block:
        file = os.open(path, os.O_RDONLY | (_O_DIRECT if direct else 0))
        try:
            if not direct and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            total = 0
            while (count := os.readv(file, [block])) and time.perf_counter() - start < seconds:
                total += count
            return total / (time.perf_counter() - start)
        finally:
            os.close(file)
