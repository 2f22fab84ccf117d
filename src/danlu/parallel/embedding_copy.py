"""The token table on the last pipeline stage too, where multi-token prediction looks up the tokens ahead.

The first stage owns the table: its optimizer, its checkpoint and its norm know it once, so that no file depends on the
layout. Both ranks hold the same shard of it. Before a step the owner sends the values, after it the copy its gradient.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from danlu.parallel.fsdp import local_shard


class EmbeddingCopy:
    """Keeps the copy of a table equal to the table; every rank that has either calls both methods in every step."""

    def __init__(
        self,
        owner: Tensor | None,
        copy: Tensor | None,
        owner_rank: int,
        copy_rank: int,
        group: ProcessGroup,
    ) -> None:
        """A rank gives what it holds of the two; the ranks are those in the pipeline's `group`."""
        self.owner, self.copy = owner, copy
        self.owner_rank, self.copy_rank, self.group = owner_rank, copy_rank, group

    @torch.no_grad()
    def send_values(self) -> None:
        """Give the copy the values of the table."""
        values = None if self.owner is None else local_shard(self.owner)[0]
        if (received := self._move(values, self.copy, self.owner_rank, self.copy_rank)) is not None:
            assert self.copy is not None
            local_shard(self.copy)[0].copy_(received)

    @torch.no_grad()
    def return_gradient(self) -> None:
        """Add the gradient of the copy to that of the table, and drop it at the copy."""
        gradient = None
        if self.copy is not None:
            assert self.copy.grad is not None, "the copy of the embedding must have a gradient after a step"
            gradient = local_shard(self.copy.grad)[0]
        received = self._move(gradient, self.owner, self.copy_rank, self.owner_rank)
        if received is not None:
            assert self.owner is not None
            assert self.owner.grad is not None
            local_shard(self.owner.grad)[0].add_(received)
        if self.copy is not None:
            self.copy.grad = None

    def _move(self, given: Tensor | None, like: Tensor | None, sender: int, receiver: int) -> Tensor | None:
        """What `sender` gives, on `receiver`; None elsewhere."""
        me = self.group.rank()
        transfer: Callable[..., dist.Work | None]
        if me == sender:
            assert given is not None
            transfer, moved = dist.isend, given.contiguous()
        elif me == receiver:
            assert like is not None
            transfer, moved = dist.irecv, torch.empty_like(local_shard(like)[0])
        else:
            return None
        if not moved.numel():  # a shard of nothing: fewer rows than ranks
            return moved if me == receiver else None
        peer = receiver if me == sender else sender
        for work in dist.batch_isend_irecv([dist.P2POp(transfer, moved, group=self.group, group_peer=peer)]):
            work.wait()
        return moved if me == receiver else None
