"""What a rank knows of its place in the mesh."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
import torch.distributed as dist
from made_meshes import place_of
from torch.distributed.device_mesh import DeviceMesh

from danlu.comm.mesh import ParallelMesh, _GroupBuilder, build_mesh
from danlu.comm.rank_layout import dense_layout
from danlu.comm.world import World
from danlu.spec import Chip, Cluster, NetworkLevel
from danlu.spec.plan import DENSE_AXES, Degrees, Plan

DEGREES = {"pp": 2, "replicate": 2, "shard": 3, "cp": 2, "tp": 2, "ep": 4}
WORLD = 48


def test_every_rank_has_a_place_of_its_own() -> None:
    places = [tuple(place_of(rank, **DEGREES).coordinate(axis) for axis in DENSE_AXES) for rank in range(WORLD)]
    assert places == list(product(*(range(DEGREES[axis]) for axis in DENSE_AXES)))


def test_experts_fold_the_same_ranks_another_way() -> None:
    axes = ("pp", "replicate", "expert_shard", "ep")
    places = [tuple(place_of(rank, **DEGREES).coordinate(axis) for axis in axes) for rank in range(WORLD)]
    assert places == list(product(range(2), range(2), range(3), range(4)))


def test_an_axis_has_its_degree() -> None:
    mesh = place_of(0, **DEGREES)
    assert [mesh.size(axis) for axis in (*DENSE_AXES, "ep", "expert_shard")] == [2, 2, 3, 2, 2, 4, 3]


def test_shares_of_the_batch_are_numbered_and_every_one_is_read_by_the_ranks_that_share_its_sequences() -> None:
    readers: dict[int, int] = {}
    for rank in range(WORLD):
        share = place_of(rank, **DEGREES).dp_rank
        readers[share] = readers.get(share, 0) + 1
    assert readers == dict.fromkeys(range(6), 8), "six shares, each read by pp × cp × tp ranks"


def test_an_axis_of_one_rank_has_no_group() -> None:
    groups = _GroupBuilder(World(3, 4)).groups(dense_layout(Plan(degrees=Degrees(shard=4))))
    assert groups["pp",] is groups["cp",] is groups["tp",] is groups["cp", "tp"] is None


CPU = torch.device("cpu")


@contextmanager
def built(plan: Plan, rank: int, cluster: Cluster | None = None) -> Iterator[ParallelMesh]:
    """The mesh of a rank whose peers do not exist."""
    world = World.fake(rank, plan.degrees.world)
    try:
        yield build_mesh(plan, World.adopt(), cluster, experts=True)
    finally:
        world.shutdown()


def ranks(mesh: DeviceMesh, axis: str) -> list[int]:
    return dist.get_process_group_ranks(mesh.get_group(axis))


@pytest.mark.parametrize("rank", [0, 17, 47])
def test_a_mesh_of_parameters_has_the_ranks_that_share_them(rank: int) -> None:
    with built(Plan(degrees=Degrees(**DEGREES)), rank) as mesh:
        layout = dense_layout(mesh.plan)
        assert mesh.tp_mesh is not None and mesh.ep_mesh is not None and mesh.expert_fsdp_mesh is not None
        assert mesh.fsdp_mesh.mesh_dim_names == ("replicate", "shard")
        assert (
            mesh.fsdp_mesh.mesh.tolist()
            == layout.ranks_along(rank, ("replicate", "shard", "cp")).reshape(2, 6).tolist()
        )
        assert mesh.expert_fsdp_mesh.shape == (2, 3)
        assert ranks(mesh.fsdp_mesh, "shard") == sorted(layout.ranks_along(rank, ("shard", "cp")).reshape(-1).tolist())
        assert ranks(mesh.fsdp_mesh, "replicate") == ranks(mesh.expert_fsdp_mesh, "replicate")
        assert ranks(mesh.tp_mesh, "tp") == layout.ranks_along(rank, ("tp",)).tolist()
        assert ranks(mesh.ep_mesh, "ep") == list(range(rank // 4 * 4, rank // 4 * 4 + 4))
        for part in (mesh.fsdp_mesh, mesh.expert_fsdp_mesh, mesh.tp_mesh, mesh.ep_mesh):
            places = [dist.get_rank(group) for group in part.get_all_groups()]
            assert tuple(part.get_coordinate() or ()) == tuple(places), "a group numbers its ranks as the mesh does"


def test_folded_axes_that_are_interleaved_on_the_network_are_numbered_as_their_group_is() -> None:
    chip = Chip(name="c", kind="cpu", memory=1, memory_bandwidth=1.0, peak={"fp32": 1.0})
    levels = [
        NetworkLevel(name=name, fanout=size, bandwidth=1.0, latency=0.0) for name, size in (("node", 4), ("fabric", 2))
    ]
    cluster = Cluster(name="made up", chip=chip, levels=tuple(levels))
    plan = Plan(degrees=Degrees(shard=4, cp=2), mapping={"shard": {"node": 4}, "cp": {"fabric": 2}})
    with built(plan, 5, cluster) as mesh:
        assert (mesh.coordinate("shard"), mesh.coordinate("cp")) == (1, 1)
        assert tuple(mesh.fsdp_mesh.get_coordinate() or ()) == (dist.get_rank(mesh.fsdp_mesh.get_group()),) == (5,)


def test_every_rank_makes_as_many_groups_and_few_at_any_size() -> None:
    made = set()
    for plan in (Plan(degrees=Degrees(**DEGREES)), Plan(degrees=Degrees(pp=8, replicate=64, shard=4, tp=8, ep=16))):
        for rank in (0, 11, plan.degrees.world - 1):
            with built(plan, rank):
                made.add((plan.degrees.world, len(dist.distributed_c10d._world.pg_names)))
    assert made == {(48, 10), (16_384, 8)}
