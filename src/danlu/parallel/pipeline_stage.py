"""A pipeline stage that frees receive and send buffers as early as it can.

torch's stage allocates a buffer for every microbatch at the start and keeps them all; its looped schedules keep every
tensor they sent until the step ends. Together that is four times the hidden states per stage and microbatch, which with
many microbatches is most of a chip's memory.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from danlu.parallel.send_completion import MicrobatchPass
from danlu.torch_compat import RecvInfo, batch_p2p, make_tensor_from_meta


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


class LazyBufferStage(PipelineStage):
    """A stage with buffers from receive to backward; with `sends`, that holds its results instead of the schedule.

    Schedules with one stage per rank send and receive in one batch and wait at once: they need no `sends`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sends: PendingSends | None = None
        self._backwards: dict[int, MicrobatchPass] = {}

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Allocate a microbatch's input, and receive into it."""
        self._allocate_buffers(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Allocate the gradients of a microbatch's output, and receive into them."""
        if self.has_backward and not self.is_last:
            self._allocate_buffers(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        """Take gradients from a stage on the same rank."""
        if any(gradient is None for gradient in next_stage_bwd_outputs):
            self._allocate_buffers(self.grad_recv_info[mb_index])
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Transfers of a microbatch's output that are left to the schedule."""
        return self._sent(MicrobatchPass("F", self.stage_index, fwd_chunk_id), super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Transfers of the gradients of a microbatch's input that are left to the schedule."""
        return self._sent(self._backwards[bwd_chunk_id], super().get_bwd_send_ops(bwd_chunk_id))

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """The forward pass of a microbatch whose input has been received."""
        self._begin(MicrobatchPass("F", self.stage_index, fwd_chunk_id))
        return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The backward pass of a microbatch whose gradients have been received; then its buffers are freed."""
        self._backwards[bwd_chunk_id] = MicrobatchPass("B" if full_backward else "I", self.stage_index, bwd_chunk_id)
        self._begin(self._backwards[bwd_chunk_id])
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._free_buffers(bwd_chunk_id)

    def clear_runtime_states(self) -> None:
        """Clear the last step."""
        super().clear_runtime_states()
        for microbatch in self.args_recv_info:
            self._free_buffers(microbatch)

    def _sent(self, step: MicrobatchPass, transfers: list[dist.P2POp]) -> list[dist.P2POp]:
        if self.sends is None:
            return transfers
        self.sends.send(step, transfers)
        return []

    def _begin(self, step: MicrobatchPass) -> None:
        if self.sends is not None:
            self.sends.release_arrived(step)

    def _allocate_buffers(self, infos: Sequence[RecvInfo]) -> None:
        for info in infos:
            if not info.is_root_arg and info.buffer is None and info.tensor_meta is not None:
                info.buffer = make_tensor_from_meta(info.tensor_meta, self.device)

    def _free_buffers(self, microbatch: int) -> None:
        """Free a microbatch's buffers; the graph, if backward is still to come, keeps what it needs."""
        for info in (*self.args_recv_info[microbatch], *self.grad_recv_info.get(microbatch, ())):
            if not info.is_root_arg and info.buffer is not None:
                info.buffer.grad = None  # already sent; the first half of a backward leaves it here until the second
                info.buffer = None

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        """As torch's, but without allocating any microbatch yet."""
        if self.is_first:
            super()._setup_forward_recv_info(num_microbatches, has_backward)
            return
        source = self.stage_index - 1
        for microbatch in range(num_microbatches):
            self.args_recv_info[microbatch] = tuple(
                RecvInfo(f"recv_for_{self.stage_index}_from_{source}", source, None, meta)
                for meta in self._stage_meta.inputs or ()
            )

    def _create_grad_recv_info(self, act_send_info: dict[int, list[int]]) -> tuple[RecvInfo, ...]:
        """As torch's, but without allocating any gradient yet."""
        gradients = self._stage_meta.output_grads
        if self.is_last or gradients is None:
            return super()._create_grad_recv_info(act_send_info)
        return tuple(
            RecvInfo(f"recv_grad_for_{self.stage_index}_from_{stages[0]}", stages[0], None, gradients[index])
            for index, stages in act_send_info.items()
        )
