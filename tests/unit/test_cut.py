"""How parameters are cut into pieces: the same as torch cuts them, but for those with fewer rows than ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from danlu.comm.mesh import ParallelMesh, build_mesh
from danlu.comm.world import World
from danlu.parallel.shard_dim import _LazyChunks, local_shard_offset, patch_fully_shard, shard_dim
from danlu.spec.plan import Degrees, Plan
from danlu.torch_compat import root_mesh


@contextmanager
def built(rank: int, **degrees: int) -> Iterator[ParallelMesh]:
    plan = Plan(degrees=Degrees(**degrees))
    world = World.fake(rank, plan.degrees.world)
    try:
        yield build_mesh(plan, World.adopt(), None, experts=True)
    finally:
        world.shutdown()


class Matrix(nn.Module):
    """One parameter, cut over `tp` along a dimension if one is given."""

    def __init__(self, weight: Tensor, mesh: ParallelMesh, dim: int | None) -> None:
        super().__init__()
        if dim is not None:
            assert mesh.tp_mesh is not None
            weight = distribute_tensor(weight, mesh.tp_mesh, [Shard(dim)])
        self.weight = nn.Parameter(weight)


@pytest.mark.parametrize(("rows", "ranks"), [(8, 4), (9, 4), (3, 8), (1, 5), (12, 5), (7, 7)])
def test_pieces_are_those_of_torch(rows: int, ranks: int) -> None:
    tensor = torch.arange(rows * 2).view(rows, 2)
    for place, expected in enumerate(_chunk_with_empty(tensor, ranks, 0)):
        found = _LazyChunks(tensor, ranks, 0)[place]
        assert found.shape == expected.shape
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("tp_dim", [None, 0, 1])
@pytest.mark.parametrize("shape", [(16, 16), (10, 6), (5, 24), (8, 7)])
@pytest.mark.parametrize("rank", [0, 7, 13, 23])
def test_a_piece_begins_where_torch_says(rank: int, shape: tuple[int, int], tp_dim: int | None) -> None:
    with built(rank, replicate=2, shard=6, tp=2) as mesh:
        unit = Matrix(torch.zeros(shape), mesh, tp_dim)
        with patch_fully_shard():
            fully_shard(unit, mesh=mesh.fsdp_mesh, shard_placement_fn=shard_dim(mesh.fsdp_mesh))
        weight = unit.weight
        assert isinstance(weight, DTensor)
        whole = root_mesh(mesh.fsdp_mesh)
        assert weight.device_mesh is (mesh.fsdp_mesh if tp_dim is None else whole), "no mesh of its own"
        local, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
        assert weight.to_local().shape == local
        if weight.to_local().numel():
            assert local_shard_offset(weight) == offset


def test_what_has_fewer_rows_than_ranks_is_cut_along_a_dimension_that_divides() -> None:
    with built(5, shard=6) as mesh:
        choose = shard_dim(mesh.fsdp_mesh)
        assert choose(nn.Parameter(torch.zeros(6, 12))) is None, "rows enough"
        assert choose(nn.Parameter(torch.zeros(4, 12, 5))) == Shard(1)
        assert choose(nn.Parameter(torch.zeros(4, 5, 12))) == Shard(2)
        assert choose(nn.Parameter(torch.zeros(4, 5, 7))) is None, "nothing divides: padded, as FSDP does"
        assert choose(nn.Parameter(torch.zeros(4))) is None


def test_a_dimension_that_another_axis_cuts_is_left_alone() -> None:
    with built(0, shard=6, tp=2) as mesh:
        assert mesh.tp_mesh is not None
        spread = distribute_tensor(torch.zeros(4, 12, 12), mesh.tp_mesh, [Shard(1)])
        assert shard_dim(mesh.fsdp_mesh)(nn.Parameter(spread)) == Shard(2)


def test_torch_has_its_own_way_again_afterwards() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    with pytest.raises(ZeroDivisionError), patch_fully_shard():
        raise ZeroDivisionError
    assert vars(_fsdp_param)["_chunk_with_empty"] is _chunk_with_empty
    if hasattr(DeviceMesh, "_concatenate"):  # not before torch 2.10
        assert DeviceMesh._concatenate.__module__.startswith("torch.")
