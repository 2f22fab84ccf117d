"""Which part of which tensor this rank holds, and which of its parts it is the one to write.

PyTorch's checkpoint planner says where a rank's part lies in the whole tensor. What several ranks hold alike is written
by one of them. Along replicated axes of its mesh that is chosen by its name, so that replicas share the work; among
ranks whose meshes do not know of each other, the first (`assigned`).
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

from danlu.storage.checkpoint.boxes import Box, volume
from danlu.storage.checkpoint.manifest import Dtype

MOST_KINDS = 8
"""Kinds of meshes that the tensors of one rank may lie on."""
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
    kind: str
    """The mesh it lies on; several ranks may hold a mesh's tensors alike without being on one mesh."""
    replica: int
    """Which of the ranks that hold it alike this one is: the writer is number 0."""


def kinds(pieces: Sequence[Piece]) -> dict[str, int]:
    """A number for what this rank would write of every kind: ranks with the same number would write the same twice.

    A plain tensor, or one that is split over some axes and unknown to others, lies on meshes that do not know of each
    other; in this they meet.
    """
    sets: dict[str, list[str]] = {}
    for piece in pieces:
        mine = sets.setdefault(piece.kind, [])
        if piece.replica == 0:
            mine.append(repr((piece.name, piece.dtype, piece.shape, piece.box)))
    if len(sets) > MOST_KINDS:
        raise ValueError(f"tensors must lie on at most {MOST_KINDS} kinds of meshes, but lie on {', '.join(sets)}")
    return {kind: (_word("\n".join(sorted(mine))) >> 1) | 1 for kind, mine in sets.items() if mine}


def words_of(pieces: Sequence[Piece]) -> list[int]:
    """The same as a list of fixed length, to be gathered."""
    found = list(kinds(pieces).values())
    return found + [0] * (MOST_KINDS - len(found))


def assigned(pieces: Sequence[Piece], before: Iterable[Sequence[int]]) -> list[Piece]:
    """The pieces, knowing the words of the ranks before this one: what one of them writes, this one does not."""
    taken: Counter[int] = Counter(word for words in before for word in words if word)
    mine = kinds(pieces)
    return [replace(piece, replica=piece.replica + taken[mine.get(piece.kind, 0)]) for piece in pieces]


def pieces_of(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """What this rank holds, as far as a rank can tell by itself."""
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
        kind, replica = "plain", 0
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            kind, replica = f"{mesh.mesh_dim_names} {tuple(mesh.shape)}", _replica(item.index.fqn, tensor)
        box = tuple(data.chunk.offsets), size
        found.append(Piece(item.index.fqn, DTYPES[tensor.dtype], tuple(data.size), box, kind, replica))
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
