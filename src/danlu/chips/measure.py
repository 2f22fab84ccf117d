"""Measure one device: matrix products, memory, and the disk beside it."""

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

DTYPES: dict[Dtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
"""Types a plain matrix product is measured in. Not fp8: it needs scales, and a CPU that emulates it takes minutes."""

_SIDES = (256, 512, 1024, 2048, 4096, 8192)
_BLOCK = 8 * 2**20
# O_DIRECT asks for addresses, offsets and lengths in whole sectors; a page is a multiple of any sector in use.
_DIRECT = getattr(os, "O_DIRECT", 0)


class MeasureError(Exception):
    """Something could not be measured; the message says why."""


def matmul_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.5, pieces: int = 4) -> float:
    """FLOP/s of square matrix products: the best of `pieces` of half of `seconds`, at the best size.

    Uses the threads the caller has set. The other half finds the size: they grow while one product still
    fits, so that a type the device only emulates costs no more time than one it is made for. Other work on
    the machine only ever lowers a rate, hence the best piece and not the mean; a caller whose ranks are that
    other work, more of them than cores, wants the mean: one piece.
    """
    best, best_side = 0.0, _SIDES[0]
    deadline = time.perf_counter() + seconds / 2
    for side in _SIDES:
        rate = _matmul_rate(device, dtype, side, seconds / 16)
        if rate > best:
            best, best_side = rate, side
        next_product = 2 * (2 * side) ** 3 / rate
        if time.perf_counter() + 2 * next_product > deadline:
            break
    return max(_matmul_rate(device, dtype, best_side, seconds / 2 / pieces) for _ in range(pieces))


def _matmul_rate(device: torch.device, dtype: torch.dtype, side: int, seconds: float) -> float:
    try:
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        product = left @ right
    except (RuntimeError, NotImplementedError) as error:
        name = str(dtype).removeprefix("torch.")
        reason = str(error).splitlines()[0]
        raise MeasureError(f"a {name} product of {side}×{side} does not run on {device}: {reason}") from None
    return 2 * side**3 / _seconds_each(lambda: torch.matmul(left, right, out=product), device, seconds)


def memory_bandwidth(device: torch.device, seconds: float = 0.5, sharers: int = 1) -> float:
    """Bytes a second of a large copy, read and written bytes both counted.

    `sharers` processes measuring at once share the host's last cache, and their buffers are sized to
    overflow it together.
    """
    size = 256 * 2**20
    if device.type == "cpu":
        size = max(64 * 2**20, host.last_level_cache() // sharers)  # two buffers: twice the cache in all
        size = min(size, host.memory_total() // (16 * sharers))
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)  # written once, so that no page is touched first while the clock runs
    return 2 * size / _seconds_each(lambda: target.copy_(source), device, seconds)


def _seconds_each(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Mean seconds of `run`, repeated for about `seconds` after one warm run."""
    synchronize = torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    run()
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    once = time.perf_counter() - start
    # One synchronisation a batch: it costs an accelerator more than a small kernel does. Several batches, because
    # on a busy machine the one timed run says little about the next.
    batch = max(1, int(seconds / 8 / max(once, 1e-7)))
    repeats, elapsed = 0, 0.0
    start = time.perf_counter()
    while elapsed < seconds:
        for _ in range(batch):
            run()
        synchronize()
        repeats += batch
        elapsed = time.perf_counter() - start
    return elapsed / repeats


def steady_seconds(run: Callable[[], object], device: torch.device, seconds: float, pieces: int = 5) -> float:
    """Seconds of `run` as it goes on and on: the median over up to `pieces` of `seconds`, each a mean.

    A mean inside a piece, because ranks that share a core take turns of milliseconds; a median over pieces, because
    other work on the machine comes and goes. What takes longer than a piece is run two times at least.
    """
    run()
    once = _batch_seconds(run, device, 1)
    batch = max(1, int(seconds / pieces / max(once, 1e-7)))
    pieces = max(2, min(pieces, int(seconds / max(once, 1e-7))))
    return statistics.median(_batch_seconds(run, device, batch) for _ in range(pieces))


def _batch_seconds(run: Callable[[], object], device: torch.device, batch: int) -> float:
    """Mean seconds of `run` over so many runs, with one synchronisation at the end."""
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
    direct: bool
    """True when the page cache was passed by; otherwise writes end with fsync and reads may come from the cache."""

    @property
    def how(self) -> str:
        """How it was measured, in words."""
        return "direct I/O" if self.direct else "buffered I/O, fsync after the write; the read may come from memory"


def disk_speed(folder: Path, size: int = 256 * 2**20, seconds: float = 2.0) -> DiskSpeed:
    """Write and read a file of at most `size` bytes in `folder`, at most `seconds` each way; the file is removed."""
    free = shutil.disk_usage(folder).free
    if free < 2 * size:
        needed = f"{2 * size / 2**20:.0f} MiB are needed to measure its disk"
        raise MeasureError(f"{folder} has {free / 2**20:.0f} MiB free, but {needed}")
    handle, name = tempfile.mkstemp(prefix="danlu-probe-", dir=folder)
    os.close(handle)
    path = Path(name)
    try:
        direct = _takes_direct(path)
        write = _write_rate(path, size, seconds, direct)
        read = _read_rate(path, seconds, direct)
    finally:
        path.unlink()
    return DiskSpeed(read, write, free, direct)


def _takes_direct(path: Path) -> bool:
    """Whether this file system opens files past the page cache; tmpfs and some overlays refuse."""
    if not _DIRECT:
        return False
    try:
        os.close(os.open(path, os.O_WRONLY | _DIRECT))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _write_rate(path: Path, size: int, seconds: float, direct: bool) -> float:
    with mmap.mmap(-1, _BLOCK) as block:  # page-aligned, as direct I/O asks
        block.write(os.urandom(_BLOCK))  # a disk that compresses gains nothing
        file = os.open(path, os.O_WRONLY | (_DIRECT if direct else 0))
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
        file = os.open(path, os.O_RDONLY | (_DIRECT if direct else 0))
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
