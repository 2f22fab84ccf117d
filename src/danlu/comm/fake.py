"""A world of any size in one process: collectives that return at once, for the dry run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import schedules
from torch.testing._internal.distributed.fake_pg import FakeStore


def join_fake(rank: int, world: int) -> None:
    """Make this process rank `rank` of a world whose other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


@dataclass(frozen=True)
class PendingTransfer:
    """A send or receive that holds its tensors as long as somebody holds it, as one of a real network does."""

    work: dist.Work
    tensors: tuple[Tensor, ...]

    def wait(self) -> None:
        """Return when the transfer is done: at once."""
        self.work.wait()


@contextmanager
def transfers_pending() -> Iterator[None]:
    """Let a pipeline's schedules hold what they send: fake transfers are done at once and would let go of it."""
    transfer = schedules._batch_p2p

    def held(operations: list[dist.P2POp], desc: str | None = None) -> list[Any]:
        tensors = tuple(operation.tensor for operation in operations)
        return [PendingTransfer(work, tensors) for work in transfer(operations, desc)]

    schedules._batch_p2p = held  # type: ignore[assignment]
    try:
        yield
    finally:
        schedules._batch_p2p = transfer
