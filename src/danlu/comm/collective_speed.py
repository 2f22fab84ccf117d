"""What collectives cost: times at several sizes, in groups on every level of the network."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist

from danlu.chips import Operation, Runtime
from danlu.spec.cluster import Collective
from danlu.spec.description import Description, Many
from danlu.spec.numbers import divisors

_LEAST_REPEATS, _MOST_REPEATS = 3, 200
_SIDE = 512
"""Rows of the product before a timed call: a few milliseconds of a core."""

Fanouts = tuple[tuple[str, int], ...]
"""Levels of the network from the innermost outwards: name, and how many of the level below it joins."""


class Fit(Description):
    """`seconds = latency + size · per_byte` for one collective over some ranks."""

    operation: Operation
    level: str
    """The outermost level of the network that its groups cross."""
    ranks: int
    """Members of a group; all groups of that kind ran at once."""
    latency: float
    """α: seconds of the whole operation, however small."""
    per_byte: float
    """β: seconds for each byte of the buffer its caller sees."""
    error: float
    """Largest departure of a measured time from the line, relative to the time."""
    sizes: Many[int]
    seconds: Many[float]
    """The measured times behind the line: the mean over ranks, of the median over repeats."""

    @property
    def bandwidth(self) -> float:
        """Bytes a second that one rank sends while it runs, counting what a ring would send and no more."""
        return traffic(self.operation, self.ranks) / self.per_byte

    @property
    def hop(self) -> float:
        """Seconds of one of the steps a ring would take."""
        return self.latency / hops(self.operation, self.ranks)

    @property
    def curve(self) -> Collective:
        """The measured times, as a cluster file has them."""
        return Collective(operation=self.operation, ranks=self.ranks, sizes=self.sizes, seconds=self.seconds)


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


@dataclass(frozen=True)
class Grouping:
    """All ranks in groups of one kind, which measure at the same time."""

    level: str
    ranks: int
    members: tuple[tuple[int, ...], ...]


def groupings(levels: Fanouts) -> Iterator[Grouping]:
    """The kinds of groups that a plan may have on these levels.

    On every level groups of each size that divides it: of neighbours there, and with all that lies below them. Of two
    kinds of one size on a level the first stands for both.
    """
    world, below = prod(fanout for _, fanout in levels), 1
    for level, fanout in levels:
        seen: set[int] = set()
        for inside in dict.fromkeys((1, below)):
            for across in reversed(divisors(fanout)):
                ranks = inside * across
                if across > 1 and ranks not in seen:
                    seen.add(ranks)
                    yield Grouping(level, ranks, tuple(_grouped(world, below, inside, across)))
        below *= fanout


def _grouped(world: int, below: int, inside: int, across: int) -> Iterator[tuple[int, ...]]:
    """Groups of `across` units of `below` ranks each, of which `inside` ranks take part together."""
    for first in range(0, world, below * across):
        for offset in range(0, below, inside):
            yield tuple(first + unit * below + offset + member for unit in range(across) for member in range(inside))


class CollectiveTimer:
    """One rank's part in timing collectives; every rank takes the same steps in the same order."""

    def __init__(self, runtime: Runtime, device: torch.device, rank: int, seconds: float, sizes: Sequence[int]) -> None:
        """Every operation gets `seconds`, over all `sizes` of its buffer in bytes."""
        self.runtime, self.device, self.rank = runtime, device, rank
        self.seconds, self.sizes = seconds, sizes
        self._left, self._right = (torch.ones(_SIDE, _SIDE, device=device) for _ in range(2))
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def fit(self, operation: Operation, grouping: Grouping) -> Fit:
        """Time one operation in groups of one kind."""
        group = self._member(operation, grouping)
        sizes: list[int] = []
        seconds: list[float] = []
        for size in self.sizes:
            # If bandwidth holds, this size takes as much longer as it is larger. Every rank reckons the same.
            if len(sizes) >= 3 and seconds[-1] * size / sizes[-1] * _LEAST_REPEATS > self.seconds:
                break
            actual, spent = self._time(group, size, self.seconds / len(self.sizes))
            sizes.append(actual)
            seconds.append(spent)
        latency, per_byte = fit_line(sizes, seconds)
        error = max(abs(latency + per_byte * n - t) / t for n, t in zip(sizes, seconds, strict=True))
        return Fit(
            operation=operation,
            level=grouping.level,
            ranks=grouping.ranks,
            latency=latency,
            per_byte=per_byte,
            error=error,
            sizes=tuple(sizes),
            seconds=tuple(seconds),
        )

    def _member(self, operation: Operation, grouping: Grouping) -> "_Member":
        """This rank in its group; groups stay open, because a second one of the same members would meet the first."""
        members = next(group for group in grouping.members if self.rank in group)
        if members not in self._groups:
            whole = len(members) == dist.get_world_size()
            made = None if whole else dist.new_group(list(members), use_local_synchronization=True)
            self._groups[members] = made
        return _Member(operation, members, self.rank, self.device, self._groups[members])

    def _time(self, group: "_Member", size: int, budget: float) -> tuple[int, float]:
        """Bytes really moved, and seconds of one call.

        The mean over ranks, because who comes late in one call lets the others wait, and leaves early in another: over
        a step every rank computes for its own time and waits for what is left of the common one.
        """
        count = max(1, size // (4 * group.ranks)) * group.ranks  # fp32 elements that divide over the ranks
        run = group.call(count)
        run()  # opens connections and touches memory
        spent: list[float] = []
        elapsed = 0.0  # of the slowest rank, so that all of them stop together
        while len(spent) < _MOST_REPEATS and (elapsed < budget or len(spent) < _LEAST_REPEATS):
            chunk = [self._clock(run, working=group.operation != "p2p") for _ in range(_LEAST_REPEATS)]
            spent += chunk
            elapsed += agreed(sum(chunk), dist.ReduceOp.MAX, self.device)
        # A message goes there and back on the clock, so one way is half of it.
        each = statistics.median(spent) / (2 if group.operation == "p2p" else 1)
        return 4 * count, agreed(each, dist.ReduceOp.SUM, self.device) / dist.get_world_size()

    def _clock(self, run: Callable[[], object], working: bool) -> float:
        """Seconds of one call, right after a product where ranks are `working`.

        In a step ranks come to a collective from their work: not all at once, their caches full of other things, and
        where they share cores with another that still computes. A message between two is timed by itself: what a
        pipeline waits for the other rank is reckoned from its schedule.
        """
        if working:
            torch.matmul(self._left, self._right)
            self.runtime.synchronize()
        start = time.perf_counter()
        run()
        self.runtime.synchronize()
        return time.perf_counter() - start


def agreed(value: float, reduction: dist.ReduceOp.RedOpType, device: torch.device) -> float:
    """A figure over all ranks, which also makes them start the next measure together."""
    # fp32, because not every chip's library reduces fp64; seven digits are more than a measurement has.
    tensor = torch.tensor([value], dtype=torch.float32, device=device)
    dist.all_reduce(tensor, op=reduction)
    return float(tensor.item())


class _Member:
    """This rank in one of the groups that measure."""

    def __init__(
        self,
        operation: Operation,
        members: tuple[int, ...],
        rank: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.operation, self.members, self.device, self.group = operation, members, device, group
        self.ranks, self.place = len(members), members.index(rank)

    def call(self, count: int) -> Callable[[], object]:
        """The collective on buffers of its own, ready to run."""
        whole = torch.ones(count, device=self.device)
        part = torch.ones(count // self.ranks, device=self.device)
        group = self.group
        match self.operation:
            case "all_reduce":
                whole.zero_()  # stays zero however often it is summed
                return lambda: dist.all_reduce(whole, group=group)
            case "all_gather":
                return lambda: dist.all_gather_single(whole, part, group=group)
            case "reduce_scatter":
                return lambda: dist.reduce_scatter_single(part, whole, group=group)
            case "all_to_all":
                other = torch.ones(count, device=self.device)
                return lambda: dist.all_to_all_single(other, whole, group=group)
            case "p2p":
                return lambda: self._ping_pong(whole)

    def _ping_pong(self, message: torch.Tensor) -> None:
        """There and back between neighbours 0–1, 2–3, … of the group; an odd last one looks on."""
        peer = self.place ^ 1
        if peer >= self.ranks:
            return
        other = self.members[peer]
        if self.place < peer:
            dist.send(message, other, group=self.group)
            dist.recv(message, other, group=self.group)
        else:
            dist.recv(message, other, group=self.group)
            dist.send(message, other, group=self.group)
