"""What a rank knows of its place in the mesh."""

from itertools import product

from made_meshes import place_of

from danlu.comm.layout import dense_ranks
from danlu.comm.mesh import _groups
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
        share = place_of(rank, **DEGREES).data_index
        readers[share] = readers.get(share, 0) + 1
    assert readers == dict.fromkeys(range(6), 8), "six shares, each read by pp × cp × tp ranks"


def test_an_axis_of_one_rank_has_no_group() -> None:
    groups = _groups(3, dense_ranks(Plan(degrees=Degrees(shard=4))))
    assert groups["pp",] is groups["cp",] is groups["tp",] is groups["cp", "tp"] is None
