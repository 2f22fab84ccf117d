"""A record of every collective: which operation, how many bytes, among whom.

Works on real groups and on the fake one of a dry run alike, so that the one can be held against the other.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName
from torch.utils._pytree import tree_leaves

_OPERATIONS = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
}
_SENDS_SECOND = ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_")
"""Operations whose second argument, not the first, is what a rank puts in."""
_NO_TRAFFIC = ("wait_tensor", "barrier", "monitored_barrier_", "_wrap_tensor_autograd")


class UnknownCollectiveError(RuntimeError):
    """A collective that this record does not know how to count."""


@dataclass(frozen=True)
class Call:
    """One collective as one rank calls it."""

    operation: str
    dtype: str
    size: int
    """Bytes this rank puts in (or takes out, for a receive)."""
    group: ProcessGroup

    @property
    def axes(self) -> str:
        """The axes the group lies along, as the mesh named it; `world` for all ranks."""
        return self.group.group_desc.removeprefix("mesh_").replace("default_pg", "world")


def is_collective(func: Any) -> bool:
    """Whether an operator talks to other ranks (or waits for them)."""
    return func.namespace in ("c10d", "_c10d_functional")


def recorded_call(func: Any, args: tuple[Any, ...]) -> Call | None:
    """The collective that an operator is with these arguments; None for one that only waits."""
    name = func._schema.name.split("::")[1]
    if name in _NO_TRAFFIC:
        return None
    if name not in _OPERATIONS:
        raise UnknownCollectiveError(f"collective {func} must be one of {', '.join(_OPERATIONS)} to be recorded")
    given = args[1] if name in _SENDS_SECOND else args[0]
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    return Call(_OPERATIONS[name], dtype, size, _group(args))


def _group(args: tuple[Any, ...]) -> ProcessGroup:
    """The group among an operator's arguments: boxed for c10d's own, by name for the functional ones."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return ProcessGroup.unbox(arg)
    names = [arg for arg in args if isinstance(arg, str)]
    return _resolve_process_group(GroupName(names[-1]))
