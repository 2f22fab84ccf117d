"""How FSDP shards a parameter, at a cost that does not grow with the number of ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from danlu.torch_compat import StridedShard, concatenate_meshes, patched_fully_shard, root_mesh


def shard_dim(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
    """Along which dim to shard a parameter over the last axis of `mesh`; None for the first, which is FSDP's default.

    FSDP pads the first dim to a multiple of the ranks: 32 experts over 256 ranks would be gathered and reduced as 256,
    with nothing on seven of eight ranks. Where there are fewer rows than ranks, another dim is sharded that divides
    evenly, if there is one that no other axis shards already.
    """
    ranks = mesh.size(mesh.ndim - 1)

    def placement(parameter: nn.Parameter) -> Shard | None:
        local: Tensor = parameter
        taken: set[int] = set()
        if isinstance(parameter, DTensor):
            local = parameter.to_local()
            taken = {each.dim for each in parameter.placements if isinstance(each, Shard)}
        if local.shape[0] >= ranks:
            return None
        free = (dim for dim in range(1, local.ndim) if dim not in taken and local.shape[dim] % ranks == 0)
        return next(map(Shard, free), None)

    return placement


@dataclass(frozen=True)
class _LazyChunks:
    """The chunks that `torch.chunk` would return, and empty ones beyond them; made on access."""

    tensor: Tensor
    count: int
    dim: int

    def __getitem__(self, index: int) -> Tensor:
        total = self.tensor.shape[self.dim]
        size = -(-total // self.count)
        start = index * size
        if start >= total and index:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, min(size, total - start))


def _concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Several slices of a mesh as one: the mesh itself where they are all of it, else a new one from torch."""
    root = root_mesh(meshes[0])
    names = tuple(name for mesh in meshes for name in mesh.mesh_dim_names or ())
    if names == root.mesh_dim_names and all(root_mesh(mesh) is root for mesh in meshes):
        return root
    return concatenate_meshes(meshes)


@contextmanager
def patch_fully_shard() -> Iterator[None]:
    """Make `fully_shard` do only what one rank needs; PyTorch 2.13 does two things that grow with the world size.

    It chunks every parameter into as many tensors as there are ranks, to keep one of them: a third of a second per
    parameter at 96,000 ranks. And it makes a new mesh for every parameter that another axis shards too; whenever two
    parameters meet in an operator, the meshes are compared rank by rank: a millisecond each time at 100,000 ranks.
    """
    with patched_fully_shard(_LazyChunks, _concatenate_meshes):
        yield


def local_shard_offset(parameter: DTensor) -> tuple[int, ...]:
    """Offset of this rank's shard in the global parameter, by the arithmetic of `torch.chunk`.

    Where two axes shard one dim, PyTorch 2.13 finds it by chunking an index for all ranks: a second per parameter at
    100,000 ranks. Axes that sharded later have strided placements, whatever their positions.
    """
    mesh, placements = parameter.device_mesh, parameter.placements
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank holds parameters of its own meshes alone"
    offset, size = [0] * parameter.ndim, list(parameter.shape)
    for axis in sorted(range(mesh.ndim), key=lambda axis: _split_factor(placements[axis])):
        placement = placements[axis]
        if isinstance(placement, Shard | StridedShard):
            piece = -(-size[placement.dim] // mesh.size(axis))
            start = min(coordinate[axis] * piece, size[placement.dim])
            offset[placement.dim] += start
            size[placement.dim] = min(piece, size[placement.dim] - start)
    return tuple(offset)


def _split_factor(placement: Placement) -> int:
    """Shards that a dim had before an axis sharded it."""
    return int(placement.split_factor) if isinstance(placement, StridedShard) else 1
