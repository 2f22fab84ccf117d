"""How FSDP cuts a parameter into the shards of its ranks: along which dimension, and without making all of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor, Shard


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


@contextmanager
def one_chunk_each() -> Iterator[None]:
    """Let FSDP make the one shard of a parameter that a rank keeps.

    PyTorch 2.13 cuts every parameter into as many tensors as there are ranks and takes one of them: a third of a second
    a parameter at 96,000 ranks, in a real run as in a dry one.
    """
    all_of_them = _fsdp_param._chunk_with_empty
    _fsdp_param._chunk_with_empty = _Chunks
    try:
        yield
    finally:
        _fsdp_param._chunk_with_empty = all_of_them
