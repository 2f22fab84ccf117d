"""Collectives of ours in the place of a library's, whoever calls them.

FSDP, DTensor, pipelining and `torch.distributed` call a group, which sends through the chip's library. Calls of groups
that were given to `answer_calls` are answered by what was given with them; those of other groups, and what is not
written here (sends, gathers to one rank, means), go to the library as before. A call that is answered returns when its
result is there, also if it was to be waited for later.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from danlu.torch_compat import finished_work, intercept_collectives, reduce_op_number

Reduction = Literal["sum", "max", "min"]
Operation = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier"]


class OwnCollectives(Protocol):
    """Collectives of one group on contiguous tensors; every rank calls the same ones in the same order."""

    @property
    def size(self) -> int:
        """Ranks of the group."""

    def answers(self, operation: Operation, size: int) -> bool:
        """Whether a call with a buffer of so many bytes is answered here; if not, on all ranks, the library does.

        An uneven all-to-all has no size that all ranks know: 0.
        """

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> None:
        """Reduce a tensor over all ranks, in place."""

    def reduce_scatter(self, output: Tensor, given: Tensor, reduction: Reduction) -> None:
        """Reduce over all ranks, and write this rank's part of as many equal ones to `output`."""

    def all_gather(self, output: Tensor, given: Tensor) -> None:
        """Write the tensors of all ranks, one after the other, to `output`."""

    def all_to_all(self, output: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        """Send `sent[r]` rows to the r-th rank, in order; `received[r]` come from it. Neither: as many to each."""

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Give all ranks the tensor of the `source`-th, in place."""

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def interrupt(self) -> None:
        """End the collectives in which this process waits, and all later ones, with an error; from any thread."""

    def close(self) -> None:
        """No collective will be called any more."""


REDUCE_OPS: dict[Reduction, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_REDUCTIONS = {int(operation.value): reduction for reduction, operation in REDUCE_OPS.items()}
_answered: dict[str, OwnCollectives] = {}


def answer_calls(group: ProcessGroup, collectives: OwnCollectives) -> None:
    """From now on answer this rank's calls of a group; all of its ranks do."""
    _answered[group.group_name] = collectives
    intercept_collectives("answer", tuple(_ANSWERS), _answer)


def collectives_of(group: ProcessGroup) -> OwnCollectives | None:
    """What answers its calls."""
    return _answered.get(group.group_name)


def is_answered(group: ProcessGroup) -> bool:
    """Whether its calls are answered here."""
    return group.group_name in _answered


def interrupt_own_collectives() -> None:
    """End those in which this process waits, and all later ones, with an error; from any thread."""
    for collectives in list(_answered.values()):
        collectives.interrupt()


def close_own_collectives() -> None:
    """Forget all groups, which are closed."""
    for collectives in _answered.values():
        collectives.close()
    _answered.clear()


def _answer(operator: str, args: tuple[Any, ...], pass_on: Callable[[], Any]) -> Any:
    answer = None
    if operator in _ANSWERS:  # whoever observes has others pass here, too
        boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        collectives = _answered.get(ProcessGroup.unbox(boxed).group_name)
        answer = _ANSWERS[operator](collectives, *args) if collectives is not None else None
    return pass_on() if answer is None else answer


def _all_reduce(
    group: OwnCollectives, tensors: list[Tensor], _: Any, operation: Any, sparse: Tensor | None, *rest: Any
) -> Any:
    reduction = _reduction(operation)
    if len(tensors) != 1 or reduction is None or not _is_dense(tensors[0]):
        return None
    tensor = tensors[0].detach()
    if not group.answers("all_reduce", tensor.nbytes):
        return None
    summed = tensor.contiguous()
    group.all_reduce(summed, reduction)
    if summed.data_ptr() != tensor.data_ptr():
        tensor.copy_(summed)
    return tensors, finished_work(tensors)


def _all_gather(group: OwnCollectives, output: Tensor, given: Tensor, *rest: Any) -> Any:
    if not output.is_contiguous() or not group.answers("all_gather", output.nbytes):
        return None
    group.all_gather(output.detach(), given.detach().contiguous())
    return output, finished_work([output])


def _all_gather_list(group: OwnCollectives, outputs: list[list[Tensor]], given: list[Tensor], *rest: Any) -> Any:
    if len(given) != 1 or any(each.shape != outputs[0][0].shape for each in outputs[0]):
        return None
    if not group.answers("all_gather", group.size * given[0].nbytes):
        return None
    gathered = given[0].new_empty((group.size, *given[0].shape))
    group.all_gather(gathered, given[0].detach().contiguous())
    for place, found in zip(outputs[0], gathered, strict=True):
        place.detach().copy_(found)
    return outputs, finished_work(outputs[0])


def _reduce_scatter(group: OwnCollectives, output: Tensor, given: Tensor, _: Any, operation: Any, *rest: Any) -> Any:
    reduction = _reduction(operation)
    if reduction is None or not output.is_contiguous() or not group.answers("reduce_scatter", given.nbytes):
        return None
    group.reduce_scatter(output.detach(), given.detach().contiguous(), reduction)
    return output, finished_work([output])


def _all_to_all(
    group: OwnCollectives,
    output: Tensor,
    given: Tensor,
    _: Any,
    received: Sequence[int],
    sent: Sequence[int],
    *rest: Any,
) -> Any:
    if not output.is_contiguous() or not group.answers("all_to_all", 0 if received or sent else given.nbytes):
        return None
    group.all_to_all(output.detach(), given.detach().contiguous(), received, sent)
    return finished_work([output])


def _broadcast(group: OwnCollectives, tensors: list[Tensor], _: Any, source: int, *rest: Any) -> Any:
    if len(tensors) != 1 or not tensors[0].is_contiguous() or not group.answers("broadcast", tensors[0].nbytes):
        return None
    group.broadcast(tensors[0].detach(), source)
    return tensors, finished_work(tensors)


def _barrier(group: OwnCollectives, *rest: Any) -> Any:
    group.barrier()
    return finished_work([])


_ANSWERS: dict[str, Callable[..., Any]] = {
    "allreduce_": _all_reduce,
    "_allgather_base_": _all_gather,
    "allgather_": _all_gather_list,
    "_reduce_scatter_base_": _reduce_scatter,
    "alltoall_base_": _all_to_all,
    "broadcast_": _broadcast,
    "barrier": _barrier,
}


def _reduction(operation: torch.ScriptObject) -> Reduction | None:
    return _REDUCTIONS.get(reduce_op_number(operation))


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.dtype.is_complex
