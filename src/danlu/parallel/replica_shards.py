"""Optimizer states sharded over replicas (PaRO's global partition): a replica moves some rows of the shard they share.

Replicas hold the same shard of a parameter and the same gradient. Each takes an optimizer step on rows of its own, so
that there are states for those alone, and all gather what the others moved. Results are the same, bit for bit, for an
optimizer that moves every element by itself.
"""

from collections.abc import Iterable, Iterator
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from danlu.torch_compat import StridedShard, all_gather_single

REPLICAS = "replicate"
"""The axis of a mesh along which replicas lie."""
_BUCKET_BYTES = 64 << 20
"""Gathered at once: what the update needs beside the states."""


class ReplicaShards:
    """The rows that this rank moves of its parameters; every replica makes it of the same ones, in the same order."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.owned: dict[nn.Parameter, nn.Parameter] = {each: _owned_rows(each) for each in parameters}
        """For every parameter, this rank's rows of its shard: the same memory."""

    def take_gradients(self) -> None:
        """Give the rows their part of the gradients."""
        for parameter, owned in self.owned.items():
            if parameter.grad is None:
                owned.grad = None
                continue
            assert isinstance(parameter, DTensor)
            assert isinstance(parameter.grad, DTensor)
            owned.grad = _distributed(_rows(parameter.grad.to_local(), *_replica(parameter)), parameter)

    @torch.no_grad()
    def gather(self) -> None:
        """Bring the rows that other replicas moved, and forget the gradients of these."""
        for bucket in self._buckets():
            index, replicas = _replica(bucket[0])
            group = bucket[0].device_mesh.get_group(REPLICAS)
            shards = [each.to_local() for each in bucket]
            mine = torch.cat([_rows(each, index, replicas).reshape(-1) for each in shards])
            padded = mine.new_zeros(sum(_most_elements(each, replicas) for each in shards))
            padded[: mine.numel()] = mine
            everyone = padded.new_empty((replicas, padded.numel()))
            all_gather_single(everyone.view(-1), padded, group)
            for replica in range(replicas):
                if replica != index:
                    rows = [_rows(each, replica, replicas) for each in shards]
                    found = everyone[replica].split([*(each.numel() for each in rows), *_rest(everyone, rows)])
                    for place, moved in zip(rows, found, strict=False):
                        place.copy_(moved.view(place.shape))
        for owned in self.owned.values():
            owned.grad = None

    def _buckets(self) -> Iterator[list[DTensor]]:
        """Parameters of one mesh and type, as many as are gathered at once."""
        bucket: list[DTensor] = []
        for parameter in self.owned:
            assert isinstance(parameter, DTensor)
            shard = parameter.to_local()
            size = sum(each.to_local().nbytes for each in bucket) + shard.nbytes
            alike = not bucket or (
                bucket[0].dtype == parameter.dtype and bucket[0].device_mesh == parameter.device_mesh
            )
            if bucket and (not alike or size > _BUCKET_BYTES):
                yield bucket
                bucket = []
            bucket.append(parameter)
        if bucket:
            yield bucket


def is_sharded_over_replicas(tensor: Tensor) -> bool:
    """Whether replicas hold different parts of it."""
    if not isinstance(tensor, DTensor) or REPLICAS not in (tensor.device_mesh.mesh_dim_names or ()):
        return False
    return not isinstance(tensor.placements[_axis(tensor)], Replicate)


def _owned_rows(parameter: nn.Parameter) -> nn.Parameter:
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
    if not isinstance(parameter, DTensor) or REPLICAS not in (names or ()):
        raise ValueError(f"a parameter must have replicas to be moved by them, but this has none: {parameter.shape}")
    rows = _rows(parameter.to_local().detach(), *_replica(parameter))
    return nn.Parameter(_distributed(rows, parameter), requires_grad=parameter.requires_grad)


def _distributed(rows: Tensor, parameter: DTensor) -> DTensor:
    """Rows of a parameter's shard as a shard of the whole."""
    mesh, axis = parameter.device_mesh, _axis(parameter)
    placements: list[Placement] = list(parameter.placements)
    inside = prod(
        mesh.size(each)
        for each, placement in enumerate(placements)
        if each != axis and isinstance(placement, Shard | StridedShard) and placement.dim == 0
    )
    placements[axis] = StridedShard(0, split_factor=inside) if inside > 1 else Shard(0)
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())


def _replica(parameter: Tensor) -> tuple[int, int]:
    """Which replica this rank is, of how many."""
    assert isinstance(parameter, DTensor)
    coordinate, axis = parameter.device_mesh.get_coordinate(), _axis(parameter)
    assert coordinate is not None, "a rank holds parameters of its own meshes alone"
    return coordinate[axis], parameter.device_mesh.size(axis)


def _axis(parameter: DTensor) -> int:
    names = parameter.device_mesh.mesh_dim_names
    assert names is not None
    return names.index(REPLICAS)


def _rows(shard: Tensor, replica: int, replicas: int) -> Tensor:
    """The rows of a replica: as `torch.chunk` splits them, and none beyond."""
    piece = -(-shard.shape[0] // replicas)
    start = min(replica * piece, shard.shape[0])
    return shard.narrow(0, start, min(piece, shard.shape[0] - start))


def _most_elements(shard: Tensor, replicas: int) -> int:
    return -(-shard.shape[0] // replicas) * prod(shard.shape[1:])


def _rest(everyone: Tensor, rows: Iterable[Tensor]) -> list[int]:
    """What pads the rows of one replica."""
    return [everyone.shape[1] - sum(each.numel() for each in rows)]
