"""A pipeline stage that frees receive and send buffers as early as it can.

torch's stage allocates a buffer for every microbatch at the start and keeps them all; its looped schedules keep every
tensor they sent until the step ends. Together that is four times the hidden states per stage and microbatch, which with
many microbatches is most of a chip's memory.
"""

from typing import Any

import torch
import torch.distributed as dist

from danlu.parallel.send_completion import MicrobatchPass
from danlu.torch_compat.pipelining import UnbufferedStage, batch_p2p


class PendingSends:
    """Sends of a rank that may be in flight; at every pass of its schedule, it frees those that are received."""

    def __init__(self, arrived: dict[MicrobatchPass, list[MicrobatchPass]]) -> None:
        """`arrived` has for a pass those whose results are known to be received when it begins."""
        self._arrived = arrived
        self._held: dict[MicrobatchPass, list[dist.Work]] = {}

    def send(self, step: MicrobatchPass, transfers: list[dist.P2POp]) -> None:
        """Send the result of a pass."""
        self._held[step] = batch_p2p(transfers)

    def release_arrived(self, step: MicrobatchPass) -> None:
        """Free what is known to be received now that the input of `step` is here."""
        for sent in self._arrived.get(step, ()):
            self._wait(sent)

    def wait_all(self) -> None:
        """Wait for the remaining sends at the end of a step."""
        for sent in list(self._held):
            self._wait(sent)

    def _wait(self, sent: MicrobatchPass) -> None:
        for work in self._held.pop(sent, ()):
            work.wait()


class LazyBufferStage(UnbufferedStage):
    """A stage with buffers from receive to backward; with `sends`, that holds its results instead of the schedule.

    Schedules with one stage per rank send and receive in one batch and wait at once: they need no `sends`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sends: PendingSends | None = None
        self._backwards: dict[int, MicrobatchPass] = {}

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Allocate a microbatch's input, and receive into it."""
        self.allocate_inputs(fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Allocate the gradients of a microbatch's output, and receive into them."""
        if self.has_backward and not self.is_last:
            self.allocate_gradients(bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        """Take gradients from a stage on the same rank."""
        if any(gradient is None for gradient in next_stage_bwd_outputs):
            self.allocate_gradients(mb_index)
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Transfers of a microbatch's output that are left to the schedule."""
        return self._sent(MicrobatchPass("F", self.stage_index, fwd_chunk_id), super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Transfers of the gradients of a microbatch's input that are left to the schedule."""
        return self._sent(self._backwards[bwd_chunk_id], super().get_bwd_send_ops(bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of a microbatch whose input has been received."""
        self._begin(MicrobatchPass("F", self.stage_index, fwd_chunk_id))
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The backward pass of a microbatch whose gradients have been received; then its buffers are freed."""
        self._backwards[bwd_chunk_id] = MicrobatchPass("B" if full_backward else "I", self.stage_index, bwd_chunk_id)
        self._begin(self._backwards[bwd_chunk_id])
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self.free_buffers(bwd_chunk_id)

    def _sent(self, step: MicrobatchPass, transfers: list[dist.P2POp]) -> list[dist.P2POp]:
        if self.sends is None:
            return transfers
        self.sends.send(step, transfers)
        return []

    def _begin(self, step: MicrobatchPass) -> None:
        if self.sends is not None:
            self.sends.release_arrived(step)
