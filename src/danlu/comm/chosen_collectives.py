"""A group's collectives, each by the algorithm that is fastest at its size.

What was not measured (broadcasts, barriers, uneven all-to-alls) goes as in a group that nothing was measured for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from torch import Tensor

from danlu.comm.own_collectives import Operation, OwnCollectives, Reduction
from danlu.cost.measured_times import CollectiveTimes
from danlu.spec.cluster import CollectiveAlgorithm, CollectiveOp, NetworkLevel

ChooseAlgorithm = Callable[[CollectiveOp, int], CollectiveAlgorithm]
"""The algorithm of a collective with a buffer of so many bytes; the same on every rank of a group."""


class AlgorithmChoice(Protocol):
    """Chooses the algorithms of all groups of a world."""

    def for_group(self, level: int, ranks: int) -> ChooseAlgorithm | None:
        """Of groups of so many ranks that cross a level of the network; None if there is no choice."""
        ...


class MeasuredChoice:
    """The fastest algorithm, as `danlu comm tune` measured them for a cluster file."""

    def __init__(self, levels: Sequence[NetworkLevel]) -> None:
        named = [[curve for curve in level.collectives if curve.algorithm != "default"] for level in levels]
        self._times = [CollectiveTimes(curves) for curves in named]

    def for_group(self, level: int, ranks: int) -> ChooseAlgorithm | None:
        """Of groups of so many ranks that cross a level of the network; None if nothing was measured there."""
        times = self._times[level]
        if times.fastest("all_reduce", ranks, 1.0) is None:
            return None

        @lru_cache(maxsize=4096)
        def choose(operation: CollectiveOp, size: int) -> CollectiveAlgorithm:
            found = times.fastest(operation, ranks, size)
            return found.algorithm if found else "default"

        return choose


@dataclass
class TrialChoice:
    """The algorithm that is being measured."""

    algorithm: CollectiveAlgorithm = "default"

    def for_group(self, level: int, ranks: int) -> ChooseAlgorithm:
        """Of every group."""
        return lambda operation, size: self.algorithm


@dataclass
class ChosenCollectives:
    """Collectives of one group by several algorithms, and by the library.

    A group may lack the algorithm that is fastest in the groups that were measured: it goes the usual way then.
    """

    by_algorithm: Mapping[CollectiveAlgorithm, OwnCollectives]
    """The first is taken unasked."""
    choose: ChooseAlgorithm
    _unasked: OwnCollectives = field(init=False)

    def __post_init__(self) -> None:
        self._unasked = next(iter(self.by_algorithm.values()))

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self._unasked.size

    @property
    def algorithms(self) -> tuple[CollectiveAlgorithm, ...]:
        """All that can be chosen among."""
        return ("library", *self.by_algorithm)

    def answers(self, operation: Operation, size: int) -> bool:
        """Whether the library is not faster."""
        algorithm = self._algorithm(operation, size)
        if algorithm in self.by_algorithm:
            return True
        return algorithm != "library" and self._unasked.answers(operation, size)

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        """Reduce a tensor over all ranks, in place."""
        self._run("all_reduce", tensor.nbytes).all_reduce(tensor, reduction)

    def reduce_scatter(self, output: Tensor, given: Tensor, reduction: Reduction) -> None:
        """Reduce over all ranks, and write this rank's part of as many equal ones to `output`."""
        self._run("reduce_scatter", given.nbytes).reduce_scatter(output, given, reduction)

    def all_gather(self, output: Tensor, given: Tensor) -> None:
        """Write the tensors of all ranks, one after the other, to `output`."""
        self._run("all_gather", output.nbytes).all_gather(output, given)

    def all_to_all(self, output: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        """Send `sent[r]` rows to the r-th rank, in order; `received[r]` come from it. Neither: as many to each."""
        self._run("all_to_all", 0 if received or sent else given.nbytes).all_to_all(output, given, received, sent)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Give all ranks the tensor of the `source`-th, in place."""
        self._unasked.broadcast(tensor, source)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._unasked.barrier()

    def interrupt(self) -> None:
        """End the collectives in which this process waits, and all later ones, with an error; from any thread."""
        for each in self.by_algorithm.values():
            each.interrupt()

    def close(self) -> None:
        """No collective will be called any more."""
        for each in self.by_algorithm.values():
            each.close()

    def _algorithm(self, operation: Operation, size: int) -> CollectiveAlgorithm:
        if operation == "broadcast" or operation == "barrier" or not size:
            return "default"
        return self.choose(operation, size)

    def _run(self, operation: Operation, size: int) -> OwnCollectives:
        return self.by_algorithm.get(self._algorithm(operation, size), self._unasked)
