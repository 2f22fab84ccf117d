"""Transfers of a fake world, which are complete at once, made to hold memory as real ones do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from danlu.torch_compat.pipelining import patched_batch_p2p


@dataclass(frozen=True)
class PendingTransfer:
    """A send or receive that keeps its tensors alive as long as it is referenced, as on a real network."""

    work: dist.Work
    tensors: tuple[Tensor, ...]

    def wait(self) -> None:
        """Wait for the transfer, which is complete at once."""
        self.work.wait()


@contextmanager
def hold_p2p_tensors() -> Iterator[None]:
    """Make pipeline schedules keep what they send: fake transfers complete at once and would free the tensors."""

    def holding(transfer: Callable[..., list[dist.Work]]) -> Callable[..., list[Any]]:
        def held(operations: list[dist.P2POp], desc: str | None = None) -> list[Any]:
            tensors = tuple(operation.tensor for operation in operations)
            return [PendingTransfer(work, tensors) for work in transfer(operations, desc)]

        return held

    with patched_batch_p2p(holding):
        yield
