"""Measure ranks that work at the same time: each one's share of the machine, and the cost of their collectives."""

import multiprocessing
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import prod
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import torch
import torch.distributed as dist
from pydantic import Field

from danlu.chips import ChipDescriptor, find_chip
from danlu.chips.device_benchmark import (
    BENCHMARK_DTYPES,
    MeasurementError,
    measure_matmul_flops,
    measure_memory_bandwidth,
    median_seconds,
)
from danlu.comm.chosen_collectives import TrialChoice
from danlu.comm.collective_benchmark import (
    OPERATIONS,
    CollectiveFit,
    CollectiveTimer,
    LevelFanouts,
    all_reduce_scalar,
    group_partitions,
)
from danlu.comm.rank_layout import level_spans
from danlu.comm.rendezvous import RankInfo, rendezvous
from danlu.comm.world import World
from danlu.language.register import use_kernels
from danlu.spec.cluster import Dtype, OperatorName, TimingCurve
from danlu.spec.description import SpecModel, TupleOf
from danlu.torch_compat import FileStore, Store

_KIB, _MIB = 2**10, 2**20
# A rank that does not answer for so long has died in a way its process does not show, or the machine hangs.
_TIMEOUT = timedelta(minutes=2)


class ProbeSettings(SpecModel):
    """How long to measure, and on which sizes."""

    peak_seconds: float
    """Seconds of matmul for each dtype."""
    memory_seconds: float
    collective_seconds: float
    """Seconds for each collective, over all its sizes."""
    collective_sizes: TupleOf[int]
    """Bytes of the caller's buffer of a collective."""
    operator_seconds: float
    """Seconds for each size of each operator."""
    dtypes: TupleOf[Dtype]
    """Dtypes in which operators are measured, if the device supports them."""
    only_collectives: bool = False
    """Measure the network alone, every collective by each of its algorithms."""


THOROUGH = ProbeSettings(
    peak_seconds=1.5,
    memory_seconds=1.0,
    collective_seconds=2.0,
    collective_sizes=tuple(_KIB * 4**power for power in range(9)),
    operator_seconds=0.12,
    dtypes=("fp32", "bf16"),
)
QUICK = ProbeSettings(
    peak_seconds=0.3,
    memory_seconds=0.2,
    collective_seconds=0.3,
    collective_sizes=(_KIB, 16 * _KIB, 256 * _KIB, 4 * _MIB, 16 * _MIB),
    operator_seconds=0.03,
    dtypes=("fp32", "bf16"),
)

_MATMUL_SIZE = 512
"""Rows of the matmul by which ranks are compared."""
_SLICE_SECONDS = 0.02
"""Seconds of work between two collectives of a step."""
_KEPT_BYTES = 64 * _MIB
"""Bytes of results kept while more are computed, as activations are: the next result goes to memory not in a cache."""


@dataclass(frozen=True)
class BenchmarkCase:
    """One size of an operator, ready to run."""

    size: float
    run: Callable[[], object]
    operations: float = 1
    """How many operations of that size one run has."""
    baseline: Callable[[], object] | None = None
    """Its time is subtracted from that of `run`. Ranks run both equally often, so both may contain collectives."""


BenchmarkFactory = Callable[[torch.device, torch.dtype], dict[OperatorName, Callable[[], Iterable[BenchmarkCase]]]]
"""Makes the cases of every operator; a module-level function, because ranks are spawned and import it."""


def no_benchmarks(
    device: torch.device, dtype: torch.dtype
) -> dict[OperatorName, Callable[[], Iterable[BenchmarkCase]]]:
    """Measure the device and the network, and no operators."""
    return {}


class RankMeasurements(SpecModel):
    """The share of one of `ranks` ranks while all of them work at once: the mean over ranks.

    Of the network alone if that was asked for: nothing of the chip.
    """

    ranks: int
    threads: int
    fits: TupleOf[CollectiveFit]
    """One per collective, kind of group and algorithm; none for a single rank."""
    peak: dict[Dtype, float] = Field(default_factory=dict)
    memory_bandwidth: float = 0.0
    alone: float = 1.0
    """How many times faster one rank computes a matmul while the others are idle."""
    late: float = 1.0
    """Time of the slowest rank for work that all begin at once, over that by which operators are measured."""
    operators: dict[Dtype, dict[OperatorName, TimingCurve]] = Field(default_factory=dict)
    left_out: dict[str, str] = Field(default_factory=dict)
    """What could not be measured, and why."""


def measurement_names(levels: LevelFanouts, settings: ProbeSettings) -> tuple[str, ...]:
    """Names of the measurements, in their order."""
    collectives = (
        f"{operation} × {group.group_size}" for group in group_partitions(levels) for operation in OPERATIONS
    )
    if settings.only_collectives:
        return tuple(collectives)
    operators = (f"operators {name}" for name in settings.dtypes)
    return (*(f"matmul {name}" for name in BENCHMARK_DTYPES), "memory", *operators, *collectives)


def measure_local_ranks(
    chip: str,
    ranks: int,
    threads: int,
    settings: ProbeSettings,
    on_step: Callable[[str], None] = lambda name: None,
    operators: BenchmarkFactory = no_benchmarks,
    level: str = "node",
) -> RankMeasurements:
    """Start `ranks` processes on this machine and measure each one's share while all run.

    Calls `on_step` as each measurement begins, and again while a long one goes on. `level` names what joins them.

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
                place = (rank, ((level, ranks),), f"{folder}/store")
                args = (writer, *place, chip, threads, settings.model_dump_json(), operators)
                process = context.Process(target=_rank_main, args=args, name=f"danlu probe rank {rank}", daemon=True)
                process.start()
                writer.close()  # this process's copy: the pipe ends when the rank's end is closed
                processes.append(process)
                readers.append(reader)
            return _collect(processes, readers, on_step)
        finally:
            for process in processes:
                process.terminate()  # its measurements have been read or will not arrive
                process.join()
            for reader in readers:
                reader.close()


def _collect(
    processes: Sequence[SpawnProcess], readers: list[Connection], on_step: Callable[[str], None]
) -> RankMeasurements:
    """Forward the ranks' progress until rank 0 has sent the measurements; the first error is raised."""
    open_readers = list(readers)
    while open_readers:
        ready = wait(open_readers, timeout=_TIMEOUT.total_seconds())
        if not ready:
            raise MeasurementError(f"no rank has answered for {_TIMEOUT}: is the machine overloaded?")
        for reader in ready:
            assert isinstance(reader, Connection)
            try:
                kind, _, text = reader.recv_bytes().decode().partition(" ")
            except EOFError:
                open_readers.remove(reader)
                continue
            if kind == "error":
                raise MeasurementError(f"rank {readers.index(reader)}: {text}")
            if kind == "figures":
                return RankMeasurements.model_validate_json(text)
            on_step(text)
    for process in processes:
        process.join()
    codes = ", ".join(str(process.exitcode) for process in processes)
    raise MeasurementError(f"the ranks exited without a result, with exit codes {codes}")


def measure_as_rank(
    rank_info: RankInfo,
    chip: str,
    threads: int,
    settings: ProbeSettings,
    levels: LevelFanouts,
    on_step: Callable[[str], None] = lambda name: None,
    operators: BenchmarkFactory = no_benchmarks,
) -> RankMeasurements:
    """Measure as one rank of a cluster whose ranks were started elsewhere, in order over its levels.

    Every rank calls this; all of them return the same measurements.
    """
    if prod(fanout for _, fanout in levels) != rank_info.world_size:
        made = " × ".join(str(fanout) for _, fanout in levels)
        raise MeasurementError(f"the levels must hold all {rank_info.world_size} ranks, but hold {made}")
    torch.set_num_threads(threads)
    place = rank_info.rank, rank_info.local_rank
    session = _RankProbe(find_chip(chip), *place, rendezvous(rank_info), levels, settings)
    try:
        return session.measure(threads, on_step, operators)
    finally:
        session.world.shutdown()


def _rank_main(
    pipe: Connection,
    rank: int,
    levels: LevelFanouts,
    store: str,
    chip: str,
    threads: int,
    settings: str,
    operators: BenchmarkFactory,
) -> None:
    """The process of one rank."""

    def send(kind: str, text: str) -> None:
        pipe.send_bytes(f"{kind} {text}".encode())

    def on_step(name: str) -> None:
        if rank == 0:
            send("step", name)

    try:
        torch.set_num_threads(threads)
        ranks, effort = prod(fanout for _, fanout in levels), ProbeSettings.model_validate_json(settings)
        session = _RankProbe(find_chip(chip), rank, rank, FileStore(store, ranks), levels, effort)
        figures = session.measure(threads, on_step, operators)
        session.world.shutdown()
        if rank == 0:
            send("figures", figures.model_dump_json())
    except Exception as error:  # any error must reach the parent
        send("error", f"{type(error).__name__}: {error}")
        raise SystemExit(1) from error


class _RankProbe:
    """One rank's view of the measurement; every rank takes the same steps in the same order."""

    def __init__(
        self,
        chip: ChipDescriptor,
        rank: int,
        local_rank: int,
        store: Store,
        levels: LevelFanouts,
        settings: ProbeSettings,
    ) -> None:
        ranks = prod(fanout for _, fanout in levels)
        if chip.backend is None and ranks > 1:
            raise MeasurementError(f"chip {chip.name} has no collectives: only runs of one rank")
        self.rank, self.ranks, self.levels, self.settings = rank, ranks, levels, settings
        self.trial = TrialChoice() if settings.only_collectives else None
        self.runtime = chip.runtime
        self.device = chip.runtime.set_device(local_rank)
        use_kernels(self.device)
        place = RankInfo(rank, ranks, local_rank)
        spans, backend = level_spans(levels), chip.backend or "gloo"  # as in a run on this network
        self.world = World.join(place, backend, store, self.device, timeout=_TIMEOUT, levels=spans, choice=self.trial)

    def measure(self, threads: int, on_step: Callable[[str], None], operators: BenchmarkFactory) -> RankMeasurements:
        """Take every measurement, all ranks at once."""
        settings = self.settings
        if settings.only_collectives:
            return RankMeasurements(ranks=self.ranks, threads=threads, fits=tuple(self._fits(on_step)))
        peak: dict[Dtype, float] = {}
        left_out: dict[str, str] = {}
        for name, dtype in BENCHMARK_DTYPES.items():
            on_step(f"matmul {name}")
            try:
                mine = measure_matmul_flops(self.device, dtype, settings.peak_seconds)
            except MeasurementError as error:
                mine, left_out[name] = 0.0, str(error)
            if (mean := self._mean(mine)) > 0:
                peak[name] = mean
        on_step("memory")
        bandwidth = self._mean(measure_memory_bandwidth(self.device, settings.memory_seconds, self.ranks))
        alone, late = self._contention(settings.peak_seconds)
        curves: dict[Dtype, dict[OperatorName, TimingCurve]] = {}
        for name in settings.dtypes:
            on_step(f"operators {name}")
            found = operators(self.device, BENCHMARK_DTYPES[name]) if name in peak else {}
            curves[name] = {}
            for operator, make in found.items():
                on_step(f"operators {name}")  # all of them may take minutes where ranks share cores
                curves[name][operator] = self._curve(make(), settings.operator_seconds)
        return RankMeasurements(
            ranks=self.ranks,
            threads=threads,
            peak=peak,
            memory_bandwidth=bandwidth,
            alone=alone,
            late=late,
            operators={name: found for name, found in curves.items() if found},
            fits=tuple(self._fits(on_step)),
            left_out=left_out,
        )

    def _fits(self, on_step: Callable[[str], None]) -> Iterator[CollectiveFit]:
        """Of every collective in groups of every kind, by every algorithm if these are compared."""
        settings = self.settings
        effort = settings.collective_seconds, settings.collective_sizes
        timer = CollectiveTimer(self.runtime, self.world, *effort, self.trial)
        for partition in group_partitions(self.levels):
            named = timer.algorithms(partition) if self.trial else ("default",)
            for operation in OPERATIONS:
                for algorithm in named if operation != "p2p" else ("default",):
                    on_step(f"{operation} × {partition.group_size}")
                    yield timer.measure(operation, partition, algorithm)

    def _mean(self, value: float) -> float:
        return all_reduce_scalar(value, dist.ReduceOp.SUM, self.device) / self.ranks

    def _contention(self, seconds: float) -> tuple[float, float]:
        """How many times faster rank 0 computes while the others wait for it, and how late the slowest of all ranks is.

        Late: its time for work that all begin at once, over that of a rank when none of them ever waits, as operators
        are measured. In slices as long as the work between two collectives: over less time ranks differ more, because
        those that share a core take turns, and over a minute less. Not over the mean of the same slices: who is done
        first leaves its core to the others, so that of ranks that share cores the mean is far below the slowest, which
        ends when all work is done and no later.
        """
        if self.ranks == 1:
            return 1.0, 1.0
        left, right = (torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, device=self.device) for _ in range(2))
        product = partial(torch.matmul, left, right)
        together = self._mean(median_seconds(product, self.device, seconds / 2))
        by_itself = median_seconds(product, self.device, seconds / 2) if self.rank == 0 else 0.0
        alone = together / all_reduce_scalar(by_itself, dist.ReduceOp.SUM, self.device)
        products, slices = max(1, round(_SLICE_SECONDS / together)), max(10, int(seconds / _SLICE_SECONDS))

        def work_slice() -> None:
            for _ in range(products):
                product()

        slowest = 0.0
        for _ in range(slices):  # all begin a slice together, as the scalar comes from all
            slowest += all_reduce_scalar(self._time_once(work_slice), dist.ReduceOp.MAX, self.device)
        return max(1.0, alone), max(1.0, slowest / (slices * products * together))

    def _curve(self, runs: Iterable[BenchmarkCase], seconds: float) -> TimingCurve:
        sizes, times = [], []
        for timed in runs:
            if timed.baseline is None:
                spent = self._mean(median_seconds(_keep_results(timed.run), self.device, seconds))
            else:
                spent = self._time_above_baseline(timed.run, timed.baseline, seconds)
            sizes.append(timed.size)
            times.append(spent / timed.operations)
        return TimingCurve(sizes=tuple(sizes), seconds=tuple(times))

    def _time_above_baseline(self, run: Callable[[], object], baseline: Callable[[], object], seconds: float) -> float:
        """How much longer `run` takes than `baseline`: the median over turns in which each runs once."""
        turns = max(
            5,
            int(
                4
                * seconds
                / all_reduce_scalar(self._time_once(run) + self._time_once(baseline), dist.ReduceOp.MAX, self.device)
            ),
        )
        spent = [self._time_once(run) - self._time_once(baseline) for _ in range(turns)]
        # Never zero, which a curve on logarithmic scales cannot have.
        return self._mean(max(1e-6, statistics.median(spent)))

    def _time_once(self, run: Callable[[], object]) -> float:
        self.runtime.synchronize()
        start = time.perf_counter()
        run()
        self.runtime.synchronize()
        return time.perf_counter() - start


def _keep_results(run: Callable[[], object]) -> Callable[[], object]:
    """The same run, which keeps its last results alive."""
    each = _result_bytes(run())
    kept: deque[object] = deque(maxlen=max(1, _KEPT_BYTES // each) if each else 1)
    return lambda: kept.append(run())


def _result_bytes(result: object) -> int:
    items = result if isinstance(result, tuple | list) else (result,)
    return sum(item.numel() * item.element_size() for item in items if isinstance(item, torch.Tensor))
