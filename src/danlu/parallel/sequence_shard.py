"""Which positions of every sequence a rank of `cp` holds: the loader, learned and rotary positions and attention agree.

Consecutive positions for Ulysses. For a ring a sequence has two chunks per rank, and rank r of n holds chunk r and
chunk 2n - 1 - r: under the causal mask a late chunk has as much more work than the mean as an early one has less.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from danlu.comm.mesh import ParallelMesh


class SequenceShard(NamedTuple):
    """The positions of one rank, in the order in which it holds them."""

    rank: int = 0
    ranks: int = 1
    zigzag: bool = False
    """Two chunks, one from either half of a sequence, instead of one piece."""

    def ranges(self, length: int) -> tuple[slice, ...]:
        """The pieces of a sequence of `length` positions, earlier ones first."""
        if not self.zigzag:
            held = length // self.ranks
            return (slice(self.rank * held, (self.rank + 1) * held),)
        chunk = length // (2 * self.ranks)
        first, second = self.rank, 2 * self.ranks - 1 - self.rank
        return slice(first * chunk, (first + 1) * chunk), slice(second * chunk, (second + 1) * chunk)

    def take(self, full_BS: Tensor) -> Tensor:
        """This rank's columns of full sequences."""
        pieces = [full_BS[:, piece] for piece in self.ranges(full_BS.shape[1])]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def positions(self, held: int, device: torch.device) -> Tensor:
        """The positions in their sequence of the `held` tokens that this rank has of it."""
        pieces = [torch.arange(p.start, p.stop, device=device) for p in self.ranges(held * self.ranks)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def sequence_shard(mesh: ParallelMesh) -> SequenceShard:
    """The positions of this rank of a run."""
    ranks = mesh.size("cp")
    return SequenceShard(mesh.coordinate("cp"), ranks, ranks > 1 and mesh.plan.context_parallel == "ring")
