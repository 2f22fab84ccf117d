"""Which part of which tensor this rank holds, and which of its parts it is the one to write.

PyTorch's checkpoint planner says where a rank's part lies in the whole tensor. What several ranks hold alike is written
by one of them, chosen without asking: along replicated axes of its mesh by its name, so that replicas share the work.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import prod

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.tensor import DTensor, Partial, Replicate

from danlu.storage.checkpoint.boxes import Box, volume
from danlu.storage.checkpoint.manifest import Dtype

DTYPES: Mapping[torch.dtype, Dtype] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Piece:
    """A box of a tensor that this rank holds."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    box: Box
    replica: int
    """Which of the ranks that hold it alike this one is: the writer is number 0."""


def plain_set(tensors: Mapping[str, Tensor]) -> int:
    """A number for the set of tensors that are no DTensors: ranks with the same number hold the same ones, alike."""
    plain = sorted((name, str(t.dtype), tuple(t.shape)) for name, t in tensors.items() if not isinstance(t, DTensor))
    return _word(repr(plain)) >> 1


def pieces(tensors: Mapping[str, Tensor], plain_replica: int) -> list[Piece]:
    """This rank's pieces; `plain_replica` counts the ranks before it with the same `plain_set`."""
    found = []
    for item in create_default_local_save_plan(dict(tensors), is_coordinator=False).items:
        data, tensor = item.tensor_data, tensors[item.index.fqn]
        if data is None:
            raise TypeError(f"{item.index.fqn} must be a tensor to be saved, but is {type(tensor).__name__}")
        size = tuple(data.chunk.sizes)
        if volume(size) == 0:
            continue
        if tensor.dtype not in DTYPES:
            raise TypeError(
                f"tensor {item.index.fqn} must have one of {', '.join(map(str, DTYPES))}, not {tensor.dtype}"
            )
        replica = _replica(item.index.fqn, tensor) if isinstance(tensor, DTensor) else plain_replica
        box = tuple(data.chunk.offsets), size
        found.append(Piece(item.index.fqn, DTYPES[tensor.dtype], tuple(data.size), box, replica))
    return found


def local_bytes(tensor: Tensor) -> Tensor:
    """The bytes of what this rank holds of a tensor, row by row: a view where it is contiguous."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().contiguous().reshape(-1).view(torch.uint8)


def _replica(name: str, tensor: DTensor) -> int:
    """This rank's number among those that hold the same part; which of them is number 0 changes from name to name."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None  # the planner leaves out tensors of other ranks
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError(f"tensor {name} must be whole on its ranks to be saved, but waits for a reduction")
    axes = [axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, Replicate)]
    sizes = [mesh.size(axis) for axis in axes]
    strides = [prod(sizes[position + 1 :]) for position in range(len(sizes))]
    mine = sum(coordinate[axis] * stride for axis, stride in zip(axes, strides, strict=True))
    return (mine + _word(name)) % prod(sizes)


def _word(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
