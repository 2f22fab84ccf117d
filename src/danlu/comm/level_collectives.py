"""A group's collectives over the levels of the network, in the place of its library's flat ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from danlu.comm import hierarchical
from danlu.comm.level_groups import LevelGroups
from danlu.comm.own_collectives import REDUCE_OPS, Operation, Reduction


@dataclass(frozen=True)
class LevelCollectives:
    """All-reduces, gathers and broadcasts by level; all-to-alls are the library's."""

    levels: LevelGroups

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.levels.size

    def answers(self, operation: Operation, size: int) -> bool:
        """All are answered but all-to-alls.

        What hosts exchange is not less by levels, and would pass the memory of both on top:
        `benchmarks/collectives.py` finds gloo's own faster at most sizes.
        """
        return operation != "all_to_all"

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        """Reduce a tensor over all ranks, in place."""
        if reduction == "sum":
            hierarchical.all_reduce(tensor, self.levels)
        else:
            for level in self.levels.levels:
                dist.all_reduce(tensor, REDUCE_OPS[reduction], group=level.group)

    def reduce_scatter(self, output: Tensor, given: Tensor, reduction: Reduction) -> None:
        """Reduce over all ranks, and write this rank's part of as many equal ones to `output`."""
        parts = given.view(self.size, -1)
        if reduction == "sum":
            output.view(-1).copy_(hierarchical.reduce_scatter(parts, self.levels).view(-1))
        else:
            whole = parts.clone()
            self.all_reduce(whole, reduction)
            output.view(-1).copy_(whole[self.levels.index])

    def all_gather(self, output: Tensor, given: Tensor) -> None:
        """Write the tensors of all ranks, one after the other, to `output`."""
        output.view(self.size, -1).copy_(hierarchical.all_gather(given.view(-1), self.levels))

    def all_to_all(self, output: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        """Send as many rows to each rank, in order."""
        output.copy_(hierarchical.all_to_all(given, self.levels))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Give all ranks the tensor of the `source`-th, in place."""
        hierarchical.broadcast(tensor, self.levels, source)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        for level in self.levels.levels:
            dist.barrier(level.group)

    def interrupt(self) -> None:
        """The groups of the levels are interrupted on their own."""

    def close(self) -> None:
        """The groups of the levels are closed on their own."""
