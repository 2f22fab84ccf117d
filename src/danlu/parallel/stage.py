"""A stage of a pipeline that holds what it receives and sends no longer than it must.

torch's own stage allocates a buffer for every microbatch at the start and keeps them all; its looped schedules keep
every tensor they sent until the step ends. Together that is four times the stream a stage and microbatch, which with
many microbatches is most of a chip.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._utils import _make_tensor_from_meta
from torch.distributed.pipelining.stage import _RecvInfo

from danlu.parallel.arrivals import Step


class Sends:
    """What a rank sent and must still hold; asked at every step of its schedule, it lets go of what has arrived."""

    def __init__(self, arrived: dict[Step, list[Step]]) -> None:
        """`arrived` names for a step those whose results have surely arrived when it begins."""
        self._arrived = arrived
        self._held: dict[Step, list[dist.Work]] = {}

    def send(self, step: Step, transfers: list[dist.P2POp]) -> None:
        """Send the result of a step."""
        self._held[step] = schedules._batch_p2p(transfers)

    def begin(self, step: Step) -> None:
        """Let go of what has arrived now that the input of `step` is there."""
        for sent in self._arrived.get(step, ()):
            self._let_go(sent)

    def finish(self) -> None:
        """Wait for what is left at the end of a step."""
        for sent in list(self._held):
            self._let_go(sent)

    def _let_go(self, sent: Step) -> None:
        for work in self._held.pop(sent, ()):
            work.wait()


class Stage(PipelineStage):
    """A stage with buffers from receive to backward; with `sends`, its results are held there and not by the schedule.

    Schedules with one stage a rank send and receive in one batch and wait at once: they need no `sends`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sends: Sends | None = None
        self._backwards: dict[int, Step] = {}

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Make room for a microbatch's input, and receive into it."""
        self._make_room(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Make room for the gradients of a microbatch's output, and receive into it."""
        if self.has_backward and not self.is_last:
            self._make_room(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        """Take gradients from a stage on the same rank."""
        if any(gradient is None for gradient in next_stage_bwd_outputs):
            self._make_room(self.grad_recv_info[mb_index])
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Transfers of a microbatch's output that the schedule has to make."""
        return self._sent(Step("F", self.stage_index, fwd_chunk_id), super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Transfers of the gradients of a microbatch's input that the schedule has to make."""
        return self._sent(self._backwards[bwd_chunk_id], super().get_bwd_send_ops(bwd_chunk_id))

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """The forward pass of a microbatch, whose input is there."""
        self._begin(Step("F", self.stage_index, fwd_chunk_id))
        return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """The backward pass of a microbatch, whose gradients are there; then its buffers go."""
        self._backwards[bwd_chunk_id] = Step("B" if full_backward else "I", self.stage_index, bwd_chunk_id)
        self._begin(self._backwards[bwd_chunk_id])
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._drop(bwd_chunk_id)

    def clear_runtime_states(self) -> None:
        """Forget the last step."""
        super().clear_runtime_states()
        for microbatch in self.args_recv_info:
            self._drop(microbatch)

    def _sent(self, step: Step, transfers: list[dist.P2POp]) -> list[dist.P2POp]:
        if self.sends is None:
            return transfers
        self.sends.send(step, transfers)
        return []

    def _begin(self, step: Step) -> None:
        if self.sends is not None:
            self.sends.begin(step)

    def _make_room(self, infos: Sequence[_RecvInfo]) -> None:
        for info in infos:
            if not info.is_root_arg and info.buffer is None and info.tensor_meta is not None:
                info.buffer = _make_tensor_from_meta(info.tensor_meta, self.device)

    def _drop(self, microbatch: int) -> None:
        """Let go of a microbatch's buffers; the graph, if it is still to be walked, holds what it needs of them."""
        for info in (*self.args_recv_info[microbatch], *self.grad_recv_info.get(microbatch, ())):
            if not info.is_root_arg and info.buffer is not None:
                info.buffer.grad = None  # passed on already; one half of a backward leaves it here until the other
                info.buffer = None

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        """As torch's, but without room for any microbatch yet."""
        if self.is_first:
            super()._setup_forward_recv_info(num_microbatches, has_backward)
            return
        source = self.stage_index - 1
        for microbatch in range(num_microbatches):
            self.args_recv_info[microbatch] = tuple(
                _RecvInfo(f"recv_for_{self.stage_index}_from_{source}", source, None, meta)
                for meta in self._stage_meta.inputs or ()
            )

    def _create_grad_recv_info(self, act_send_info: dict[int, list[int]]) -> tuple[_RecvInfo, ...]:
        """As torch's, but without room for any gradient yet."""
        gradients = self._stage_meta.output_grads
        if self.is_last or gradients is None:
            return super()._create_grad_recv_info(act_send_info)
        return tuple(
            _RecvInfo(f"recv_grad_for_{self.stage_index}_from_{stages[0]}", stages[0], None, gradients[index])
            for index, stages in act_send_info.items()
        )
