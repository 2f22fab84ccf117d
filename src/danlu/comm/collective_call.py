"""Parse a collective call: its operation, bytes and group.

Works both on real groups and on the fake ones of a dry run, so that the two can be compared.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from danlu.torch_compat import resolve_process_group, tree_leaves

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
_INPUT_IS_SECOND = ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_")
"""Operations whose input is the second argument, not the first."""
_NO_TRAFFIC = ("wait_tensor", "barrier", "monitored_barrier_", "_wrap_tensor_autograd")
_LEVEL = re.compile(r"·\d+$")

DTYPE_BYTES = {
    str(dtype).removeprefix("torch."): dtype.itemsize
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
"""Bytes of one element, by the name of its type."""


class UnknownCollectiveError(RuntimeError):
    """A collective whose bytes this module cannot count."""


@dataclass(frozen=True)
class CollectiveCall:
    """One collective as one rank calls it."""

    operation: str
    dtype: str
    size: int
    """Bytes of this rank's input (of its output for a receive)."""
    group: ProcessGroup

    @property
    def axes(self) -> str:
        """The axes of the group, from the name the mesh gave it; `world` for all ranks.

        A group across one level of the network, `ep·1`, is of its axis.
        """
        name = self.group.group_desc.removeprefix("mesh_").replace("default_pg", "world")
        return _LEVEL.sub("", name)


def is_collective(func: Any) -> bool:
    """Whether an operator communicates with other ranks (or waits for them)."""
    return func.namespace in ("c10d", "_c10d_functional")


def collective_operation(name: str) -> str | None:
    """The operation of an operator such as `c10d::allreduce_`; None if it only waits."""
    operator = name.split("::")[1]
    if operator in _NO_TRAFFIC:
        return None
    if operator not in _OPERATIONS:
        raise UnknownCollectiveError(f"collective {name} must be one of {', '.join(_OPERATIONS)} to be recorded")
    return _OPERATIONS[operator]


def input_position(name: str) -> int:
    """Which argument of an operator such as `c10d::allreduce_` is this rank's input."""
    return int(name.split("::")[1] in _INPUT_IS_SECOND)


def parse_collective(func: Any, args: tuple[Any, ...]) -> CollectiveCall | None:
    """The collective of an operator call; None if it only waits."""
    operation = collective_operation(func._schema.name)
    if operation is None:
        return None
    given = args[input_position(func._schema.name)]
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    return CollectiveCall(operation, dtype, size, _group(args))


def _group(args: tuple[Any, ...]) -> ProcessGroup:
    """The group among an operator's arguments: boxed for c10d operators, by name for functional ones."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return ProcessGroup.unbox(arg)
    names = [arg for arg in args if isinstance(arg, str)]
    return resolve_process_group(names[-1])
