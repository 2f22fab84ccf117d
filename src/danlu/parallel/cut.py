"""How a parameter is cut into the pieces of its ranks, at a cost that does not grow with their number."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def cut_over(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
    """Along which dimension to cut a parameter over the last axis of `mesh`; None for the first, which is FSDP's way.

    FSDP pads the first dimension to a multiple of the ranks: 32 experts over 256 ranks would be gathered and reduced as
    256, with nothing on seven of eight ranks. Where there are fewer rows than ranks, another dimension is cut that
    divides evenly, if there is one that no other axis cuts already.
    """
    ranks = mesh.size(mesh.ndim - 1)

    def placement(parameter: nn.Parameter) -> Shard | None:
        local: Tensor = parameter
        taken: set[int] = set()
        if isinstance(parameter, DTensor):
            local = parameter.to_local()
            taken = {place.dim for place in parameter.placements if isinstance(place, Shard)}
        if local.shape[0] >= ranks:
            return None
        free = (dim for dim in range(1, local.ndim) if dim not in taken and local.shape[dim] % ranks == 0)
        return next(map(Shard, free), None)

    return placement


@dataclass(frozen=True)
class _Chunks:
    """The pieces into which `torch.chunk` would cut a tensor, and empty ones beyond them; made when asked for."""

    tensor: Tensor
    count: int
    dim: int

    def __getitem__(self, place: int) -> Tensor:
        whole = self.tensor.shape[self.dim]
        size = -(-whole // self.count)
        start = place * size
        if start >= whole and place:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, min(size, whole - start))


def _joined(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Several slices of a mesh as one: that mesh itself where they are all of it, else a new one, as torch makes it."""
    whole = meshes[0]._get_root_mesh()
    names = tuple(name for mesh in meshes for name in mesh.mesh_dim_names or ())
    if names == whole.mesh_dim_names and all(mesh._get_root_mesh() is whole for mesh in meshes):
        return whole
    return _joined_by_torch(meshes)


_joined_by_torch = DeviceMesh._concatenate


@contextmanager
def lean_fsdp() -> Iterator[None]:
    """Let `fully_shard` do what one rank needs; PyTorch 2.13 does two things that grow with the world, real or dry.

    It cuts every parameter into as many tensors as there are ranks, to keep one of them: a third of a second a
    parameter at 96,000 ranks. And it makes a mesh of its own for every parameter that another axis cuts too; whenever
    two parameters meet in an operator, these are compared rank by rank: a millisecond each time at 100,000 ranks.
    """
    fsdp: Any = _fsdp_param
    mesh: Any = DeviceMesh
    all_pieces = fsdp._chunk_with_empty
    fsdp._chunk_with_empty, mesh._concatenate = _Chunks, staticmethod(_joined)
    try:
        yield
    finally:
        fsdp._chunk_with_empty, mesh._concatenate = all_pieces, staticmethod(_joined_by_torch)


def held_offset(parameter: DTensor) -> tuple[int, ...]:
    """Where in the whole parameter this rank's piece begins, by the arithmetic of `torch.chunk`.

    PyTorch 2.13 finds it by cutting an index into the pieces of all ranks where two axes cut one dimension: a second a
    parameter at 100,000 ranks. The axis that cut last has a strided placement, whatever its position.
    """
    mesh, placements = parameter.device_mesh, parameter.placements
    place = mesh.get_coordinate()
    assert place is not None, "a rank holds parameters of its own meshes alone"
    offset, size = [0] * parameter.ndim, list(parameter.shape)
    for axis in sorted(range(mesh.ndim), key=lambda axis: isinstance(placements[axis], _StridedShard)):
        cut = placements[axis]
        if isinstance(cut, Shard | _StridedShard):
            piece = -(-size[cut.dim] // mesh.size(axis))
            start = min(place[axis] * piece, size[cut.dim])
            offset[cut.dim] += start
            size[cut.dim] = min(piece, size[cut.dim] - start)
    return tuple(offset)
