"""What torch's pipelining keeps private: stages that keep no buffers, schedules by their actions."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining import stage as pipeline_stage
from torch.distributed.pipelining.stage import _RecvInfo


def batch_p2p(operations: list[dist.P2POp]) -> list[dist.Work]:
    """Start sends and receives together, as the schedules do."""
    return schedules._batch_p2p(operations)


@contextmanager
def patched_batch_p2p(wrap: Callable[[Callable[..., list[dist.Work]]], Callable[..., list[Any]]]) -> Iterator[None]:
    """Let `wrap` replace the function by which pipeline schedules send and receive."""
    original = schedules._batch_p2p
    schedules._batch_p2p = wrap(original)
    try:
        yield
    finally:
        schedules._batch_p2p = original


_make_tensor: Any = pipeline_stage._make_tensor_from_meta  # type: ignore[attr-defined]
_InferenceMode: Any = getattr(schedules, "InferenceMode", None)
_STAGES_VOTE = _InferenceMode is not None
"""Since 2.12 stages describe tensors by metadata of their own and agree on shapes before the first step."""
_RETURNS_OUTPUTS = "return_outputs" in inspect.signature(schedules.PipelineScheduleSingle.step).parameters
"""Before 2.10 a schedule keeps the last stage's outputs of all microbatches, to return them."""


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()


def _functions_expire() -> bool:
    """Whether the node of an `autograd.Function` is gone with its outputs, although Python still holds it."""
    node = _Identity.apply(torch.zeros(1, requires_grad=True)).grad_fn
    try:
        return not node._input_metadata
    except RuntimeError:
        return True


_FUNCTIONS_EXPIRE = _functions_expire()
"""Before 2.13. A split backward pass keeps such nodes for the gradients of weights, after it has freed the outputs."""


class UnbufferedStage(PipelineStage):
    """torch's pipeline stage, but it has no receive buffer until `allocate_inputs` or `allocate_gradients`.

    torch's own allocates those of all microbatches at the start and keeps them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._graphs: dict[int, list[Any]] = {}
        """Of microbatches whose weights still wait for their gradients: nodes that own the graph."""

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Take the backward pass of a microbatch, or that of its inputs alone."""
        if _FUNCTIONS_EXPIRE and not full_backward:
            outputs = (loss,) if self.is_last else self.fwd_cache[bwd_chunk_id][0]
            # The node of a view is torch's own, which lives as long as Python holds it.
            self._graphs[bwd_chunk_id] = [
                output.view_as(output).grad_fn for output in outputs if output is not None and output.requires_grad
            ]
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Take the rest of a microbatch's backward pass."""
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._graphs.pop(bwd_chunk_id, None)

    def allocate_inputs(self, microbatch: int) -> None:
        """Make the buffers that a microbatch's input is received in."""
        self._allocate(self.args_recv_info[microbatch], requires_grad=not _STAGES_VOTE and self.has_backward)

    def allocate_gradients(self, microbatch: int) -> None:
        """Make the buffers that the gradients of a microbatch's output are received in."""
        self._allocate(self.grad_recv_info[microbatch], requires_grad=False)

    def free_buffers(self, microbatch: int) -> None:
        """Free a microbatch's buffers; the graph, if backward is still to come, keeps what it needs."""
        for info in (*self.args_recv_info[microbatch], *self.grad_recv_info.get(microbatch, ())):
            if _is_received(info) and info.buffer is not None:
                info.buffer.grad = None  # already sent; the first half of a backward leaves it here until the second
                info.buffer = None

    def clear_runtime_states(self) -> None:
        """Clear the last step."""
        self.fwd_cache.clear()
        self.output_chunks.clear()
        for microbatch in self.args_recv_info:
            self.free_buffers(microbatch)

    def _allocate(self, infos: Sequence[Any], requires_grad: bool) -> None:
        for info in infos:
            if _is_received(info) and info.buffer is None and info.tensor_meta is not None:
                info.buffer = _make_tensor(info.tensor_meta, self.device).requires_grad_(requires_grad)

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        """Called by torch since 2.12."""
        if self.is_first:
            super()._setup_forward_recv_info(num_microbatches, has_backward)
            return
        for microbatch in range(num_microbatches):
            self.args_recv_info[microbatch] = self._receive_infos(self._stage_meta.inputs or (), self.stage_index - 1)

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        """Does all of the work before 2.12, buffers included: given meta tensors' own shapes, it would allocate."""
        if _STAGES_VOTE or self.is_first:
            return super()._prepare_forward_infra(num_microbatches, *args, **kwargs)
        older: Any = self
        for microbatch in range(num_microbatches):
            self.args_recv_info[microbatch] = self._receive_infos(older.inputs_meta, self.stage_index - 1)
        following = [] if self.is_last else [self.stage_index + 1]
        self.act_send_info = dict.fromkeys(range(len(older.get_outputs_meta())), following)
        return ()

    def _create_grad_recv_info(self, act_send_info: dict[int, list[int]]) -> tuple[Any, ...]:
        older: Any = self
        gradients = self._stage_meta.output_grads if _STAGES_VOTE else older.get_outputs_meta()
        if self.is_last or gradients is None:
            return super()._create_grad_recv_info(act_send_info)
        return self._receive_infos([gradients[index] for index in act_send_info], self.stage_index + 1)

    def _receive_infos(self, metas: Sequence[Any], source: int) -> tuple[Any, ...]:
        infos = []
        for meta in metas:
            extra = (meta,) if _STAGES_VOTE else ()
            info: Any = _RecvInfo(f"recv_for_{self.stage_index}_from_{source}", source, None, *extra)
            info.tensor_meta = meta
            infos.append(info)
        return tuple(infos)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """The messages that open connections before the first step.

        Before 2.12 they may go to this very rank, and what is sent is longer than what is received: gloo refuses both.
        """
        messages: list[Any] = super()._get_init_p2p_neighbors_ops()
        if _STAGES_VOTE:
            return messages
        for message in messages:
            message.tensor = torch.zeros(1, device=self.device)
        return [message for message in messages if message.group_peer != self.group_rank]


def _is_received(info: Any) -> bool:
    """Whether an input of a stage comes from another; before 2.12 those of the first are of another class."""
    return isinstance(info, _RecvInfo) and not getattr(info, "is_root_arg", False)


def looped_schedule(kind: Callable[..., Any], stages: list[Any], microbatches: int, loss: Callable[..., Any]) -> Any:
    """A schedule of several stages per rank, which sums gradients and knows all its sends and receives.

    Before 2.10 such a schedule exchanges in lockstep, and a rank with two neighboring stages would send to itself; what
    later became its base class runs it as it does now.
    """
    schedule = kind(stages, microbatches, loss_fn=loss, scale_grads=False)
    if hasattr(schedule, "pipeline_order_with_comms"):
        return schedule
    runtime = schedules._PipelineScheduleRuntime(stages, microbatches, loss_fn=loss, scale_grads=False)
    runtime._prepare_schedule_with_comms(schedule.pipeline_order)
    return runtime


def action_kind(action: Any) -> str:
    """The letter of an action of a schedule; before 2.12 its value is a number, and its text the letter."""
    value = action.computation_type.value
    return value if isinstance(value, str) else str(action.computation_type)


def discard_outputs(schedule: Any) -> dict[str, Any]:
    """Keep a schedule from collecting the last stage's outputs; options for its `step`."""
    if _RETURNS_OUTPUTS:
        return {"return_outputs": False}
    schedule._merge_outputs = lambda _: None
    return {}


def skip_shape_exchange(schedule: Any, stages: Sequence[Any]) -> None:
    """Let a pipeline take the shapes it was given, without a vote of ranks that a dry run does not have."""
    if not _STAGES_VOTE:
        for stage in stages:
            stage._get_init_p2p_neighbors_ops = list
        return
    for stage in stages:
        stage._inference_mode = _InferenceMode.STATIC
    schedule._warmup_p2p = lambda *_: None


def wrap_schedule_loss(schedule: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the loss function of a pipeline schedule, if this rank has one."""
    if schedule._loss_fn:
        schedule._loss_fn = wrap(schedule._loss_fn)
