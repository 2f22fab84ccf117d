"""Measure ranks at work together: each one's share of the machine, and what their collectives cost."""

import multiprocessing
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import prod
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store

from danlu.chips import OPERATIONS, Descriptor, find
from danlu.chips.measure import DTYPES, MeasureError, matmul_peak, memory_bandwidth, steady_seconds
from danlu.comm.collective_speed import CollectiveTimer, Fanouts, Fit, agreed, groupings
from danlu.comm.join import Place, meet
from danlu.spec.cluster import Curve, Dtype, Operator
from danlu.spec.description import Description, Many

_KIB, _MIB = 2**10, 2**20
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
    operator: float
    """Seconds for each size of each operator."""
    dtypes: Many[Dtype]
    """Types in which operators are measured, where the device knows them."""


THOROUGH = Effort(
    peak=1.5,
    memory=1.0,
    collective=2.0,
    sizes=tuple(_KIB * 4**power for power in range(9)),
    operator=0.12,
    dtypes=("fp32", "bf16"),
)
QUICK = Effort(
    peak=0.3,
    memory=0.2,
    collective=0.3,
    sizes=(_KIB, 16 * _KIB, 256 * _KIB, 4 * _MIB, 16 * _MIB),
    operator=0.03,
    dtypes=("fp32", "bf16"),
)

_SIDE = 512
"""Rows of a product by which ranks are compared."""
_PIECE = 0.02
"""Seconds of work between two collectives of a step."""
_KEPT = 64 * _MIB
"""Bytes of results that stay while more are made, as activations do: the next goes where no cache has been lately."""


@dataclass(frozen=True)
class Timed:
    """One size of an operator, ready to run."""

    size: float
    run: Callable[[], object]
    count: float = 1
    """How many of that size it does at once."""
    less: Callable[[], object] | None = None
    """What of `run` is not meant: its time is taken off. Ranks run both equally often, so they may meet in them."""


Operators = Callable[[torch.device, torch.dtype], dict[Operator, Callable[[], Iterable[Timed]]]]
"""Makes the runs of every operator; a function of a module, because ranks are started afresh and look it up."""


def no_operators(device: torch.device, dtype: torch.dtype) -> dict[Operator, Callable[[], Iterable[Timed]]]:
    """Measure the device and the network, and no operators."""
    return {}


class RankFigures(Description):
    """What one of `ranks` ranks gets while all of them work at once: the mean over them."""

    ranks: int
    threads: int
    peak: dict[Dtype, float]
    memory_bandwidth: float
    alone: float
    """How many times faster one rank multiplies while the others rest."""
    late: float
    """How many times longer than on the mean of them equal work takes on the slowest rank: what the others wait for."""
    operators: dict[Dtype, dict[Operator, Curve]]
    fits: Many[Fit]
    """One a collective and kind of group; none for a single rank."""
    left_out: dict[str, str]
    """What could not be measured, and why."""


def steps(levels: Fanouts, effort: Effort) -> tuple[str, ...]:
    """Names of the measures that are taken, in their order."""
    collectives = (f"{operation} × {group.ranks}" for group in groupings(levels) for operation in OPERATIONS)
    operators = (f"operators {name}" for name in effort.dtypes)
    return (*(f"matmul {name}" for name in DTYPES), "memory", *operators, *collectives)


def measure_ranks(
    chip: str,
    ranks: int,
    threads: int,
    effort: Effort,
    on_step: Callable[[str], None] = lambda name: None,
    operators: Operators = no_operators,
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
                args = (writer, rank, ranks, chip, threads, effort.model_dump_json(), f"{folder}/store", operators)
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


def measure_place(
    place: Place,
    chip: str,
    threads: int,
    effort: Effort,
    levels: Fanouts,
    on_step: Callable[[str], None] = lambda name: None,
    operators: Operators = no_operators,
) -> RankFigures:
    """Measure as one rank of a cluster whose ranks were started elsewhere, in order over its levels.

    Every rank calls this; all of them get the same figures.
    """
    if prod(fanout for _, fanout in levels) != place.world:
        made = " × ".join(str(fanout) for _, fanout in levels)
        raise MeasureError(f"the levels must hold all {place.world} ranks, but hold {made}")
    torch.set_num_threads(threads)
    session = _Session(find(chip), place.rank, place.world, place.local_rank, meet(place))
    try:
        return session.measure(threads, effort, levels, on_step, operators)
    finally:
        dist.destroy_process_group()


def _rank(
    pipe: Connection,
    rank: int,
    ranks: int,
    chip: str,
    threads: int,
    effort: str,
    store: str,
    operators: Operators,
) -> None:
    """The life of one rank."""

    def say(kind: str, text: str) -> None:
        pipe.send_bytes(f"{kind} {text}".encode())

    def on_step(name: str) -> None:
        if rank == 0:
            say("step", name)

    try:
        torch.set_num_threads(threads)
        session = _Session(find(chip), rank, ranks, rank, FileStore(store, ranks))
        level = (("node", ranks),)
        figures = session.measure(threads, Effort.model_validate_json(effort), level, on_step, operators)
        dist.destroy_process_group()
        if rank == 0:
            say("figures", figures.model_dump_json())
    except Exception as error:  # whatever it was, the parent must hear of it
        say("error", f"{type(error).__name__}: {error}")
        raise SystemExit(1) from error


class _Session:
    """One rank's view of the measurement; every rank takes the same steps in the same order."""

    def __init__(self, chip: Descriptor, rank: int, ranks: int, local_rank: int, store: Store) -> None:
        if chip.collectives is None and ranks > 1:
            raise MeasureError(f"chip {chip.name} has {chip.missing()['collectives']}")
        self.rank, self.ranks = rank, ranks
        self.runtime = chip.runtime
        self.device = chip.runtime.device(local_rank)
        dist.init_process_group(
            chip.collectives.backend if chip.collectives else None,
            store=store,
            rank=rank,
            world_size=ranks,
            timeout=_PATIENCE,
            device_id=None if self.device.type == "cpu" else self.device,
        )

    def measure(
        self, threads: int, effort: Effort, levels: Fanouts, on_step: Callable[[str], None], operators: Operators
    ) -> RankFigures:
        """Take every measure, all ranks at once."""
        peak: dict[Dtype, float] = {}
        left_out: dict[str, str] = {}
        for name, dtype in DTYPES.items():
            on_step(f"matmul {name}")
            try:
                mine = matmul_peak(self.device, dtype, effort.peak)
            except MeasureError as error:
                mine, left_out[name] = 0.0, str(error)
            if (mean := self._mean(mine)) > 0:
                peak[name] = mean
        on_step("memory")
        bandwidth = self._mean(memory_bandwidth(self.device, effort.memory, self.ranks))
        alone, late = self._alone(effort.peak), self._late(effort.peak)
        curves: dict[Dtype, dict[Operator, Curve]] = {}
        for name in effort.dtypes:
            on_step(f"operators {name}")
            if name in peak:
                found = operators(self.device, DTYPES[name])
                curves[name] = {operator: self._curve(make(), effort.operator) for operator, make in found.items()}
        fits: list[Fit] = []
        timer = CollectiveTimer(self.runtime, self.device, self.rank, effort.collective, effort.sizes)
        for grouping in groupings(levels):
            for operation in OPERATIONS:
                on_step(f"{operation} × {grouping.ranks}")
                fits.append(timer.fit(operation, grouping))
        return RankFigures(
            ranks=self.ranks,
            threads=threads,
            peak=peak,
            memory_bandwidth=bandwidth,
            alone=alone,
            late=late,
            operators={name: found for name, found in curves.items() if found},
            fits=tuple(fits),
            left_out=left_out,
        )

    def _mean(self, value: float) -> float:
        return agreed(value, dist.ReduceOp.SUM, self.device) / self.ranks

    def _alone(self, seconds: float) -> float:
        """How many times faster rank 0 multiplies while the others wait for it."""
        if self.ranks == 1:
            return 1.0
        left, right = (torch.randn(_SIDE, _SIDE, device=self.device) for _ in range(2))
        run = partial(torch.matmul, left, right)
        together = self._mean(steady_seconds(run, self.device, seconds / 2))
        by_itself = steady_seconds(run, self.device, seconds / 2) if self.rank == 0 else 0.0
        return max(1.0, together / agreed(by_itself, dist.ReduceOp.SUM, self.device))

    def _late(self, seconds: float) -> float:
        """How long the slowest rank takes for work that all begin at once, over the mean of them.

        In pieces as long as what ranks do between two collectives: over a moment they lie further apart, as those that
        share a core take turns, and over a minute closer.
        """
        if self.ranks == 1:
            return 1.0
        left, right = (torch.randn(_SIDE, _SIDE, device=self.device) for _ in range(2))
        product = partial(torch.matmul, left, right)
        once = agreed(steady_seconds(product, self.device, _PIECE), dist.ReduceOp.MAX, self.device)
        products = max(1, int(_PIECE / once))

        def piece() -> None:
            for _ in range(products):
                product()

        mine, slowest = 0.0, 0.0
        for _ in range(max(10, int(seconds / _PIECE))):
            spent = self._once(piece)
            mine += spent
            slowest += agreed(spent, dist.ReduceOp.MAX, self.device)  # all begin the next piece together
        return max(1.0, slowest / self._mean(mine))

    def _curve(self, runs: Iterable[Timed], seconds: float) -> Curve:
        sizes, times = [], []
        for timed in runs:
            if timed.less is None:
                spent = self._mean(steady_seconds(_keeping(timed.run), self.device, seconds))
            else:
                spent = self._beside(timed.run, timed.less, seconds)
            sizes.append(timed.size)
            times.append(spent / timed.count)
        return Curve(sizes=tuple(sizes), seconds=tuple(times))

    def _beside(self, run: Callable[[], object], less: Callable[[], object], seconds: float) -> float:
        """How much longer the one takes than the other: the median over turns in which each is run once."""
        turns = max(5, int(4 * seconds / agreed(self._once(run) + self._once(less), dist.ReduceOp.MAX, self.device)))
        spent = [self._once(run) - self._once(less) for _ in range(turns)]
        # Never nothing: a curve on logarithmic scales has no place for it.
        return self._mean(max(1e-6, statistics.median(spent)))

    def _once(self, run: Callable[[], object]) -> float:
        self.runtime.synchronize()
        start = time.perf_counter()
        run()
        self.runtime.synchronize()
        return time.perf_counter() - start


def _keeping(run: Callable[[], object]) -> Callable[[], object]:
    """The same run, with its last results kept."""
    each = _bytes(run())
    kept: deque[object] = deque(maxlen=max(1, _KEPT // each) if each else 1)
    return lambda: kept.append(run())


def _bytes(result: object) -> int:
    parts = result if isinstance(result, tuple | list) else (result,)
    return sum(part.numel() * part.element_size() for part in parts if isinstance(part, torch.Tensor))
