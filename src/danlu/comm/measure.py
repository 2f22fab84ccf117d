"""Measure ranks at work together: each one's share of the machine, and what their collectives cost."""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from danlu.chips import OPERATIONS, Descriptor, Operation, find
from danlu.chips.measure import DTYPES, MeasureError, matmul_peak, memory_bandwidth
from danlu.spec.cluster import Dtype
from danlu.spec.description import Description, Many

_KIB, _MIB = 2**10, 2**20
_LEAST_REPEATS, _MOST_REPEATS = 3, 200
# A rank that has not answered for so long has died in a way its process does not show, or the machine is stuck.
_PATIENCE = timedelta(minutes=2)


class Effort(Description):
    """How long to measure, and on which sizes."""

    peak: float
    """Seconds for each type of matrix product."""
    memory: float
    collective: float
    """Seconds for each collective, over all its sizes."""
    sizes: Many[int]
    """Bytes a collective is asked to move, as the buffer its caller sees."""


THOROUGH = Effort(peak=1.5, memory=1.0, collective=2.5, sizes=tuple(_KIB * 4**power for power in range(9)))
QUICK = Effort(peak=0.3, memory=0.2, collective=0.3, sizes=(_KIB, 16 * _KIB, 256 * _KIB, 4 * _MIB, 16 * _MIB))


class Fit(Description):
    """`seconds = latency + size · per_byte` for one collective over some ranks."""

    operation: Operation
    ranks: int
    latency: float
    """α: seconds of the whole operation, however small."""
    per_byte: float
    """β: seconds for each byte of the buffer its caller sees."""
    error: float
    """Largest departure of a measured time from the line, relative to the time."""
    sizes: Many[int]
    seconds: Many[float]
    """The measured times behind the line: of the slowest rank, median of the repeats."""

    @property
    def bandwidth(self) -> float:
        """Bytes a second that one rank sends while it runs, counting what a ring would send and no more."""
        return traffic(self.operation, self.ranks) / self.per_byte

    @property
    def hop(self) -> float:
        """Seconds of one of the steps a ring would take."""
        return self.latency / hops(self.operation, self.ranks)


class RankFigures(Description):
    """What one of `ranks` ranks gets while all of them work at once: the mean over them."""

    ranks: int
    threads: int
    peak: dict[Dtype, float]
    memory_bandwidth: float
    fits: Many[Fit]
    """One a collective; none for a single rank."""
    left_out: dict[str, str]
    """What could not be measured, and why."""


def traffic(operation: Operation, ranks: int) -> float:
    """Bytes a ring sends from each rank for each byte of the caller's buffer."""
    if operation == "p2p":
        return 1.0
    return (2.0 if operation == "all_reduce" else 1.0) * (ranks - 1) / ranks


def hops(operation: Operation, ranks: int) -> int:
    """Steps of a ring, one after the other."""
    if operation == "p2p":
        return 1
    return (2 if operation == "all_reduce" else 1) * (ranks - 1)


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """α and β of `seconds = α + β · size`, neither below zero, with the least relative error.

    Weighing each time by its inverse square makes a microsecond of a small message count as much as a
    millisecond of a large one: the small sizes fix α, the large ones β.
    """
    if len(sizes) < 2 or len(sizes) != len(seconds):
        raise ValueError(f"`sizes` and `seconds` must be two or more pairs, but are {len(sizes)} and {len(seconds)}")
    weights = [second**-2 for second in seconds]
    total = sum(weights)
    mean_size = sum(w * size for w, size in zip(weights, sizes, strict=True)) / total
    mean_seconds = sum(w * second for w, second in zip(weights, seconds, strict=True)) / total
    pairs = list(zip(weights, sizes, seconds, strict=True))
    covariance = sum(w * (size - mean_size) * (second - mean_seconds) for w, size, second in pairs)
    beta = covariance / sum(w * (size - mean_size) ** 2 for w, size, _ in pairs)
    alpha = mean_seconds - beta * mean_size
    if alpha < 0:
        return 0.0, sum(w * size * second for w, size, second in pairs) / sum(w * size**2 for w, size, _ in pairs)
    return (alpha, beta) if beta > 0 else (mean_seconds, 0.0)


def steps(ranks: int) -> tuple[str, ...]:
    """Names of the measures `measure_ranks` takes, in its order."""
    return (*(f"matmul {name}" for name in DTYPES), "memory", *(OPERATIONS if ranks > 1 else ()))


def measure_ranks(
    chip: str, ranks: int, threads: int, effort: Effort, on_step: Callable[[str], None] = lambda name: None
) -> RankFigures:
    """Start `ranks` processes on this machine and measure what each gets while all run; calls `on_step` as each begins.

    Processes are spawned, so a script that calls this needs the usual `if __name__ == "__main__":`.
    They report by JSON over pipes.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="danlu-probe-") as folder:
        processes: list[SpawnProcess] = []
        readers: list[Connection] = []
        try:
            for rank in range(ranks):
                reader, writer = context.Pipe(duplex=False)
                args = (writer, rank, ranks, chip, threads, effort.model_dump_json(), f"{folder}/store")
                process = context.Process(target=_rank, args=args, name=f"danlu probe rank {rank}", daemon=True)
                process.start()
                writer.close()  # ours: the pipe ends when the rank's own end does
                processes.append(process)
                readers.append(reader)
            return _listen(processes, readers, on_step)
        finally:
            for process in processes:
                process.terminate()  # whatever it still does, its figures have been read or will not come
                process.join()
            for reader in readers:
                reader.close()


def _listen(
    processes: Sequence[SpawnProcess], readers: list[Connection], on_step: Callable[[str], None]
) -> RankFigures:
    """Pass on what the ranks say until rank 0 has sent the figures; the first error ends it."""
    open_readers = list(readers)
    while open_readers:
        ready = wait(open_readers, timeout=_PATIENCE.total_seconds())
        if not ready:
            raise MeasureError(f"no rank has answered for {_PATIENCE}: is the machine overloaded?")
        for reader in ready:
            assert isinstance(reader, Connection)
            try:
                kind, _, text = reader.recv_bytes().decode().partition(" ")
            except EOFError:
                open_readers.remove(reader)
                continue
            if kind == "error":
                raise MeasureError(f"rank {readers.index(reader)}: {text}")
            if kind == "figures":
                return RankFigures.model_validate_json(text)
            on_step(text)
    for process in processes:
        process.join()
    codes = ", ".join(str(process.exitcode) for process in processes)
    raise MeasureError(f"the ranks ended without figures, with exit codes {codes}")


def _rank(pipe: Connection, rank: int, ranks: int, chip: str, threads: int, effort: str, store: str) -> None:
    """The life of one rank."""

    def say(kind: str, text: str) -> None:
        pipe.send_bytes(f"{kind} {text}".encode())

    def on_step(name: str) -> None:
        if rank == 0:
            say("step", name)

    try:
        torch.set_num_threads(threads)
        session = _Session(find(chip), rank, ranks, store)
        figures = session.measure(threads, Effort.model_validate_json(effort), on_step)
        dist.destroy_process_group()
        if rank == 0:
            say("figures", figures.model_dump_json())
    except Exception as error:  # whatever it was, the parent must hear of it
        say("error", f"{type(error).__name__}: {error}")
        raise SystemExit(1) from error


class _Session:
    """One rank's view of the measurement; every rank takes the same steps in the same order."""

    def __init__(self, chip: Descriptor, rank: int, ranks: int, store: str) -> None:
        if chip.collectives is None and ranks > 1:
            raise MeasureError(f"chip {chip.name} has {chip.missing()['collectives']}")
        self.rank, self.ranks = rank, ranks
        self.runtime = chip.runtime
        self.device = chip.runtime.device(rank)
        dist.init_process_group(
            chip.collectives.backend if chip.collectives else None,
            store=FileStore(store, ranks),
            rank=rank,
            world_size=ranks,
            timeout=_PATIENCE,
            device_id=None if self.device.type == "cpu" else self.device,
        )

    def measure(self, threads: int, effort: Effort, on_step: Callable[[str], None]) -> RankFigures:
        """Take every measure, all ranks at once."""
        peak: dict[Dtype, float] = {}
        left_out: dict[str, str] = {}
        for name, dtype in DTYPES.items():
            on_step(f"matmul {name}")
            try:
                mine = matmul_peak(self.device, dtype, effort.peak)
            except MeasureError as error:
                mine, left_out[name] = 0.0, str(error)
            if (mean := self._agreed(mine, dist.ReduceOp.SUM) / self.ranks) > 0:
                peak[name] = mean
        on_step("memory")
        copy = memory_bandwidth(self.device, effort.memory, self.ranks)
        bandwidth = self._agreed(copy, dist.ReduceOp.SUM) / self.ranks
        fits: list[Fit] = []
        for operation in OPERATIONS if self.ranks > 1 else ():
            on_step(operation)
            fits.append(self._fit(operation, effort))
        return RankFigures(
            ranks=self.ranks,
            threads=threads,
            peak=peak,
            memory_bandwidth=bandwidth,
            fits=tuple(fits),
            left_out=left_out,
        )

    def _agreed(self, value: float, reduction: dist.ReduceOp.RedOpType) -> float:
        """A figure over all ranks, which also makes them start the next measure together."""
        # fp32, because not every chip's library reduces fp64; seven digits are more than a measurement has.
        tensor = torch.tensor([value], dtype=torch.float32, device=self.device)
        dist.all_reduce(tensor, op=reduction)
        return float(tensor.item())

    def _fit(self, operation: Operation, effort: Effort) -> Fit:
        sizes: list[int] = []
        seconds: list[float] = []
        for size in effort.sizes:
            # If bandwidth holds, this size takes as much longer as it is larger. Every rank reckons the same.
            if len(sizes) >= 3 and seconds[-1] * size / sizes[-1] * _LEAST_REPEATS > effort.collective:
                break
            actual, spent = self._time(operation, size, effort.collective / len(effort.sizes))
            sizes.append(actual)
            seconds.append(spent)
        latency, per_byte = fit_line(sizes, seconds)
        error = max(abs(latency + per_byte * n - t) / t for n, t in zip(sizes, seconds, strict=True))
        return Fit(
            operation=operation,
            ranks=self.ranks,
            latency=latency,
            per_byte=per_byte,
            error=error,
            sizes=tuple(sizes),
            seconds=tuple(seconds),
        )

    def _time(self, operation: Operation, size: int, budget: float) -> tuple[int, float]:
        """Bytes really moved, and seconds of one call on the slowest rank."""
        count = max(1, size // (4 * self.ranks)) * self.ranks  # fp32 elements that divide over the ranks
        run = self._call(operation, count)
        run()  # opens connections and touches memory
        spent: list[float] = []
        elapsed = 0.0  # of the slowest rank, so that all of them stop together
        while len(spent) < _MOST_REPEATS and (elapsed < budget or len(spent) < _LEAST_REPEATS):
            chunk = [self._clock(run) for _ in range(_LEAST_REPEATS)]
            spent += chunk
            elapsed += self._agreed(sum(chunk), dist.ReduceOp.MAX)
        # A message goes there and back on the clock, so one way is half of it.
        each = statistics.median(spent) / (2 if operation == "p2p" else 1)
        return 4 * count, self._agreed(each, dist.ReduceOp.MAX)

    def _clock(self, run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        self.runtime.synchronize()
        return time.perf_counter() - start

    def _call(self, operation: Operation, count: int) -> Callable[[], object]:
        """The collective on buffers of its own, ready to run."""
        whole = torch.ones(count, device=self.device)
        part = torch.ones(count // self.ranks, device=self.device)
        match operation:
            case "all_reduce":
                whole.zero_()  # stays zero however often it is summed
                return lambda: dist.all_reduce(whole)
            case "all_gather":
                return lambda: dist.all_gather_single(whole, part)
            case "reduce_scatter":
                return lambda: dist.reduce_scatter_single(part, whole)
            case "all_to_all":
                other = torch.ones(count, device=self.device)
                return lambda: dist.all_to_all_single(other, whole)
            case "p2p":
                return lambda: self._ping_pong(whole)

    def _ping_pong(self, message: torch.Tensor) -> None:
        """There and back between neighbours 0–1, 2–3, …; an odd last rank looks on."""
        peer = self.rank ^ 1
        if peer >= self.ranks:
            return
        if self.rank < peer:
            dist.send(message, peer)
            dist.recv(message, peer)
        else:
            dist.recv(message, peer)
            dist.send(message, peer)
