"""The cost of collectives: times at several sizes, in groups on every level of the network."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import get_args

import torch
import torch.distributed as dist

from danlu.chips import Runtime
from danlu.comm.chosen_collectives import ChosenCollectives, TrialChoice
from danlu.comm.own_collectives import collectives_of
from danlu.comm.world import World
from danlu.spec.cluster import CollectiveAlgorithm, CollectiveCurve, CollectiveOp
from danlu.spec.description import SpecModel, TupleOf
from danlu.spec.divisors import divisors
from danlu.torch_compat import all_gather_single, reduce_scatter_single

_MIN_REPEATS, _MAX_REPEATS = 3, 200
_PRECEDING_MATMUL_ROWS = 512
"""Rows of the matmul before a timed call: a few milliseconds of a core."""

OPERATIONS: tuple[CollectiveOp, ...] = get_args(CollectiveOp)
LevelFanouts = tuple[tuple[str, int], ...]
"""Levels of the network from the innermost outwards: name, and how many of the level below it joins."""


class CollectiveFit(SpecModel):
    """`seconds = latency + size · per_byte` for one collective over some ranks."""

    operation: CollectiveOp
    level: str
    """The outermost level of the network that its groups cross."""
    ranks: int
    """Members of a group; all groups of that kind ran at once."""
    latency: float
    """α: seconds of the operation, however small the buffer."""
    per_byte: float
    """β: seconds for each byte of the buffer its caller sees."""
    error: float
    """Largest deviation of a measured time from the line, relative to the time."""
    algorithm: CollectiveAlgorithm = "default"
    sizes: TupleOf[int]
    seconds: TupleOf[float]
    """The measured times behind the line: the mean over ranks, of the median over repeats."""

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second that one rank sends while it runs, counting only what a ring would send.

        Where noise hid the slope, all the time of the largest message counts: the bandwidth is at least that.
        """
        per_byte = self.per_byte or self.seconds[-1] / self.sizes[-1]
        return bus_bandwidth_factor(self.operation, self.ranks) / per_byte

    @property
    def hop_latency(self) -> float:
        """Seconds of one step of a ring."""
        return self.latency / ring_steps(self.operation, self.ranks)

    @property
    def cluster_entry(self) -> CollectiveCurve:
        """The measured times in the form of a cluster file."""
        return CollectiveCurve(
            operation=self.operation,
            ranks=self.ranks,
            algorithm=self.algorithm,
            sizes=self.sizes,
            seconds=self.seconds,
        )


def bus_bandwidth_factor(operation: CollectiveOp, ranks: int) -> float:
    """Bytes that each rank of a ring sends per byte of the caller's buffer."""
    if operation == "p2p":
        return 1.0
    return (2.0 if operation == "all_reduce" else 1.0) * (ranks - 1) / ranks


def ring_steps(operation: CollectiveOp, ranks: int) -> int:
    """Steps of a ring, one after the other."""
    if operation == "p2p":
        return 1
    return (2 if operation == "all_reduce" else 1) * (ranks - 1)


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """α and β of `seconds = α + β · size`, neither below zero, with the least relative error.

    Weighting each time by its inverse square makes a microsecond of a small message count as much as a
    millisecond of a large one: the small sizes determine α, the large ones β.
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


@dataclass(frozen=True)
class GroupPartition:
    """All ranks in groups of one kind, which measure at the same time."""

    level: str
    group_size: int
    groups: tuple[tuple[int, ...], ...]


def group_partitions(levels: LevelFanouts) -> Iterator[GroupPartition]:
    """The kinds of groups that a plan may have on these levels.

    On every level, groups of each size that divides it: of neighbors on that level, alone and with all ranks below
    them. Of two kinds with the same size on a level only the first is measured.
    """
    world, below = prod(fanout for _, fanout in levels), 1
    for level, fanout in levels:
        seen: set[int] = set()
        for inside in dict.fromkeys((1, below)):
            for across in reversed(divisors(fanout)):
                ranks = inside * across
                if across > 1 and ranks not in seen:
                    seen.add(ranks)
                    yield GroupPartition(level, ranks, tuple(_rank_groups(world, below, inside, across)))
        below *= fanout


def _rank_groups(world: int, below: int, inside: int, across: int) -> Iterator[tuple[int, ...]]:
    """Groups over `across` units of `below` ranks each, with `inside` ranks of every unit."""
    for first in range(0, world, below * across):
        for offset in range(0, below, inside):
            yield tuple(first + unit * below + offset + member for unit in range(across) for member in range(inside))


def element_counts(sizes: Sequence[int], ranks: int) -> list[int]:
    """Elements in fp32 of so many bytes that divide over the ranks: in a large group the smallest sizes are one."""
    return sorted({max(1, size // (4 * ranks)) * ranks for size in sizes})


class CollectiveTimer:
    """Times collectives on one rank; every rank takes the same steps in the same order."""

    def __init__(
        self, runtime: Runtime, world: World, seconds: float, sizes: Sequence[int], trial: TrialChoice | None = None
    ) -> None:
        """Every operation is timed for `seconds` over all `sizes` (bytes of its buffer).

        To measure algorithms, `trial` is what chooses among them in this world.
        """
        self.trial = trial or TrialChoice()
        self.runtime, self.world, self.device, self.rank = runtime, world, world.device, world.rank
        self.seconds, self.sizes = seconds, sizes
        self._left, self._right = (
            torch.ones(_PRECEDING_MATMUL_ROWS, _PRECEDING_MATMUL_ROWS, device=self.device) for _ in range(2)
        )
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def algorithms(self, partition: GroupPartition) -> tuple[CollectiveAlgorithm, ...]:
        """Those that all groups of a kind can be measured by; ranks ask together."""
        group = self._group(self._members(partition))
        own = collectives_of(group) if group is not None else None
        here = own.algorithms if isinstance(own, ChosenCollectives) else ("library",)
        names: tuple[CollectiveAlgorithm, ...] = get_args(CollectiveAlgorithm)
        lacking = self.world.any_rank_each([name not in here for name in names])
        return tuple(name for name, lacks in zip(names, lacking, strict=True) if not lacks)

    def measure(
        self, operation: CollectiveOp, partition: GroupPartition, algorithm: CollectiveAlgorithm = "default"
    ) -> CollectiveFit:
        """Time one operation in groups of one kind."""
        group = self._member(operation, partition)
        self.trial.algorithm = algorithm
        sizes: list[int] = []
        seconds: list[float] = []
        for count in element_counts(self.sizes, group.ranks):
            # If bandwidth stays the same, time grows with size. All ranks compute the same estimate.
            if len(sizes) >= 3 and seconds[-1] * 4 * count / sizes[-1] * _MIN_REPEATS > self.seconds:
                break
            sizes.append(4 * count)
            seconds.append(self._seconds_of(group, count, self.seconds / len(self.sizes)))
        latency, per_byte = fit_line(sizes, seconds)
        error = max(abs(latency + per_byte * n - t) / t for n, t in zip(sizes, seconds, strict=True))
        return CollectiveFit(
            operation=operation,
            level=partition.level,
            ranks=partition.group_size,
            latency=latency,
            per_byte=per_byte,
            error=error,
            algorithm=algorithm,
            sizes=tuple(sizes),
            seconds=tuple(seconds),
        )

    def _member(self, operation: CollectiveOp, partition: GroupPartition) -> "_GroupMember":
        """This rank in its group."""
        members = self._members(partition)
        return _GroupMember(operation, members, self.rank, self.device, self._group(members))

    def _members(self, partition: GroupPartition) -> tuple[int, ...]:
        return next(group for group in partition.groups if self.rank in group)

    def _group(self, members: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Groups stay open until all is measured."""
        if members not in self._groups:
            self._groups[members] = self.world.new_group(members, "probe")
        return self._groups[members]

    def _seconds_of(self, group: "_GroupMember", count: int, budget: float) -> float:
        """Seconds of one call on so many fp32 elements.

        The mean over ranks, because a rank that is late in one call makes the others wait, and waits itself in another:
        over a step every rank computes for its own time and waits for the rest of the common one.
        """
        run = group.prepare_collective(count)
        run()  # opens connections and touches memory
        spent: list[float] = []
        elapsed = 0.0  # of the slowest rank, so that all of them stop together
        while len(spent) < _MAX_REPEATS and (elapsed < budget or len(spent) < _MIN_REPEATS):
            chunk = [self._time_call(run, working=group.operation != "p2p") for _ in range(_MIN_REPEATS)]
            spent += chunk
            elapsed += all_reduce_scalar(sum(chunk), dist.ReduceOp.MAX, self.device)
        # A message is timed there and back, so one way is half the time.
        each = statistics.median(spent) / (2 if group.operation == "p2p" else 1)
        return all_reduce_scalar(each, dist.ReduceOp.SUM, self.device) / dist.get_world_size()

    def _time_call(self, run: Callable[[], object], working: bool) -> float:
        """Seconds of one call, directly after a matmul if ranks are `working`.

        In a step ranks enter a collective from their computation: not all at once, with caches full of other data, and
        possibly sharing cores with a rank that still computes. A message between two ranks is timed without it: how
        long a pipeline waits for the other rank is computed from its schedule.
        """
        if working:
            torch.matmul(self._left, self._right)
            self.runtime.synchronize()
        start = time.perf_counter()
        run()
        self.runtime.synchronize()
        return time.perf_counter() - start


def all_reduce_scalar(value: float, reduction: dist.ReduceOp.RedOpType, device: torch.device) -> float:
    """Reduce a number over all ranks, which also makes them start the next measurement together."""
    # fp32, because not every chip's library reduces fp64; seven digits are more than a measurement has.
    tensor = torch.tensor([value], dtype=torch.float32, device=device)
    dist.all_reduce(tensor, op=reduction)
    return float(tensor.item())


class _GroupMember:
    """This rank in one of the measured groups."""

    def __init__(
        self,
        operation: CollectiveOp,
        members: tuple[int, ...],
        rank: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.operation, self.members, self.device, self.group = operation, members, device, group
        self.ranks, self.group_rank = len(members), members.index(rank)

    def prepare_collective(self, count: int) -> Callable[[], object]:
        """The collective on its own buffers, ready to run."""
        full = torch.ones(count, device=self.device)
        shard = torch.ones(count // self.ranks, device=self.device)
        group = self.group
        match self.operation:
            case "all_reduce":
                full.zero_()  # stays zero however often it is summed
                return lambda: dist.all_reduce(full, group=group)
            case "all_gather":
                return lambda: all_gather_single(full, shard, group=group)
            case "reduce_scatter":
                return lambda: reduce_scatter_single(shard, full, group=group)
            case "all_to_all":
                other = torch.ones(count, device=self.device)
                return lambda: dist.all_to_all_single(other, full, group=group)
            case "p2p":
                return lambda: self._ping_pong(full)

    def _ping_pong(self, message: torch.Tensor) -> None:
        """There and back between neighbors 0–1, 2–3, … of the group; an odd last rank does nothing."""
        peer = self.group_rank ^ 1
        if peer >= self.ranks:
            return
        other = self.members[peer]
        if self.group_rank < peer:
            dist.send(message, other, group=self.group)
            dist.recv(message, other, group=self.group)
        else:
            dist.recv(message, other, group=self.group)
            dist.send(message, other, group=self.group)
