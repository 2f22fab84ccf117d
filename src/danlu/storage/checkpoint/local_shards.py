"""Which shards of which tensors this rank holds, and which of them it writes.

PyTorch's checkpoint planner gives the offset of a rank's shard in the full tensor. A shard that several ranks hold is
written by one of them. Along replicated axes of its mesh the tensor's name decides which, so that replicas share the
work; among ranks on unrelated meshes, it is the first (`assign_writers`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import prod

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.tensor import DTensor, Partial, Replicate

from danlu.storage.checkpoint.boxes import Box, numel
from danlu.storage.checkpoint.manifest import SafetensorsDtype

MAX_MESH_KINDS = 8
"""Kinds of meshes that the tensors of one rank may be on."""
SAFETENSORS_NAMES: Mapping[torch.dtype, SafetensorsDtype] = {
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
class LocalShard:
    """A box of a tensor that this rank holds."""

    name: str
    dtype: SafetensorsDtype
    shape: tuple[int, ...]
    box: Box
    mesh_kind: str
    """The mesh it is on; several ranks may hold the same tensors without being on one mesh."""
    replica_id: int
    """Number of this rank among those that hold the same shard: the writer is number 0."""


def write_set_hashes(shards: Sequence[LocalShard]) -> dict[str, int]:
    """A hash of what this rank would write of every mesh kind: ranks with the same hash would write the same twice.

    A plain tensor, or one that is sharded over some axes only, is on unrelated meshes; these hashes find the
    duplicates.
    """
    sets: dict[str, list[str]] = {}
    for shard in shards:
        mine = sets.setdefault(shard.mesh_kind, [])
        if shard.replica_id == 0:
            mine.append(repr((shard.name, shard.dtype, shard.shape, shard.box)))
    if len(sets) > MAX_MESH_KINDS:
        raise ValueError(f"tensors must be on at most {MAX_MESH_KINDS} kinds of meshes, but are on {', '.join(sets)}")
    return {kind: (_hash64("\n".join(sorted(mine))) >> 1) | 1 for kind, mine in sets.items() if mine}


def write_set_words(shards: Sequence[LocalShard]) -> list[int]:
    """The same as a list of fixed length, to be gathered."""
    found = list(write_set_hashes(shards).values())
    return found + [0] * (MAX_MESH_KINDS - len(found))


def assign_writers(shards: Sequence[LocalShard], before: Iterable[Sequence[int]]) -> list[LocalShard]:
    """The shards, given the words of the ranks before this one: what one of them writes, this one does not."""
    taken: Counter[int] = Counter(word for words in before for word in words if word)
    mine = write_set_hashes(shards)
    return [replace(shard, replica_id=shard.replica_id + taken[mine.get(shard.mesh_kind, 0)]) for shard in shards]


def local_shards(tensors: Mapping[str, Tensor]) -> list[LocalShard]:
    """The shards of this rank, as far as it can know by itself."""
    found = []
    for item in create_default_local_save_plan(dict(tensors), is_coordinator=False).items:
        data, tensor = item.tensor_data, tensors[item.index.fqn]
        if data is None:
            raise TypeError(f"{item.index.fqn} must be a tensor to be saved, but is {type(tensor).__name__}")
        size = tuple(data.chunk.sizes)
        if numel(size) == 0:
            continue
        if tensor.dtype not in SAFETENSORS_NAMES:
            raise TypeError(
                f"tensor {item.index.fqn} must have one of {', '.join(map(str, SAFETENSORS_NAMES))}, not {tensor.dtype}"
            )
        kind, replica = "plain", 0
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            kind, replica = f"{mesh.mesh_dim_names} {tuple(mesh.shape)}", _replica_id(item.index.fqn, tensor)
        box = tuple(data.chunk.offsets), size
        found.append(LocalShard(item.index.fqn, SAFETENSORS_NAMES[tensor.dtype], tuple(data.size), box, kind, replica))
    return found


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, as a plain one."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def local_bytes(tensor: Tensor) -> Tensor:
    """The bytes of this rank's shard of a tensor, row by row: a view if it is contiguous."""
    return local_tensor(tensor).contiguous().reshape(-1).view(torch.uint8)


def _replica_id(name: str, tensor: DTensor) -> int:
    """This rank's number among those that hold the same shard; which of them is number 0 depends on the name."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None  # the planner skips tensors of other ranks
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError(f"tensor {name} must be reduced before it is saved, but has a Partial placement")
    axes = [axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, Replicate)]
    sizes = [mesh.size(axis) for axis in axes]
    strides = [prod(sizes[position + 1 :]) for position in range(len(sizes))]
    mine = sum(coordinate[axis] * stride for axis, stride in zip(axes, strides, strict=True))
    return (mine + _hash64(name)) % prod(sizes)


def _hash64(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
