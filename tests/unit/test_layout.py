"""Where ranks stand: hand-made cases, and what must hold of any plan on any network."""

import random
from collections.abc import Iterable
from math import gcd, prod

import numpy as np
import pytest

from danlu.comm.rank_layout import RankArray, dense_layout, dense_ranks, expert_layout
from danlu.spec import Chip, Cluster, Degrees, NetworkLevel, Plan, load_cluster
from danlu.spec.plan import DENSE_AXES, Axis
from danlu.spec.rank_placement import EXPERT_AXES, PlacementError, innermost_common_level, placement_levels


def cluster(**fanouts: int) -> Cluster:
    """A network by its fan-outs, innermost level first."""
    chip = Chip(name="c", kind="cpu", memory=1, memory_bandwidth=1.0, peak={"fp32": 1.0})
    levels = [NetworkLevel(name=name, fanout=fanout, bandwidth=1.0, latency=0.0) for name, fanout in fanouts.items()]
    return Cluster(name="made up", chip=chip, levels=tuple(levels))


def plan(mapping: dict[Axis, dict[str, int]] | None = None, **degrees: int) -> Plan:
    return Plan(degrees=Degrees(**degrees), mapping=mapping or {})


def along(ranks: RankArray, axes: tuple[str, ...], axis: str) -> list[list[int]]:
    """The groups of an axis, each in the order of its ranks."""
    groups = np.moveaxis(ranks, axes.index(axis), -1).reshape(-1, ranks.shape[axes.index(axis)])
    return [[int(rank) for rank in group] for group in groups]


def expert_ranks(placed: Plan, network: Cluster | None = None) -> RankArray:
    return expert_layout(placed, network).ranks_along(0, EXPERT_AXES)


# --- hand-made cases


def test_without_a_network_tensor_parallelism_is_innermost_and_the_pipeline_outermost() -> None:
    ranks = dense_ranks(plan(pp=2, replicate=2, shard=2, cp=2, tp=2))
    assert ranks.tolist() == np.arange(32).reshape(2, 2, 2, 2, 2).tolist()


def test_axes_left_to_themselves_fill_a_network_from_the_inside() -> None:
    ranks = dense_ranks(plan(pp=2, shard=4, tp=4), cluster(node=8, fabric=4))
    assert along(ranks, DENSE_AXES, "tp")[0] == [0, 1, 2, 3]
    # Two of the four shards share the node with the first, two are on the next one.
    assert along(ranks, DENSE_AXES, "shard")[0] == [0, 4, 8, 12]
    assert along(ranks, DENSE_AXES, "pp")[0] == [0, 16]


def test_an_axis_takes_what_divides_of_a_level_and_goes_on_outside() -> None:
    ranks = dense_ranks(plan(shard=4, tp=6), cluster(node=4, fabric=6))
    # Six ranks of tp: a pair on the node (4 has no factor of 3), three such nodes.
    assert along(ranks, DENSE_AXES, "tp")[0] == [0, 1, 4, 5, 8, 9]
    assert along(ranks, DENSE_AXES, "shard")[0] == [0, 2, 12, 14]


def test_a_mapping_puts_data_parallelism_inside_and_experts_across_supernodes() -> None:
    """BaGuaLu's placement: what talks all-to-all goes across, what reduces stays inside."""
    sunway = cluster(node=1, supernode=8, fabric=4)
    across = plan({"ep": {"fabric": 4}}, shard=32, ep=4)
    experts = expert_ranks(across, sunway)
    assert experts.shape == (1, 1, 8, 4)
    assert along(experts, EXPERT_AXES, "ep")[0] == [0, 8, 16, 24], "one rank in each supernode"
    assert along(experts, EXPERT_AXES, "expert_shard")[0] == list(range(8)), "copies of an expert share a supernode"
    inside = expert_ranks(plan(shard=32, ep=4), sunway)
    assert along(inside, EXPERT_AXES, "ep")[0] == [0, 1, 2, 3], "left to itself it stays where the network is fastest"


def test_experts_may_lie_on_two_levels_at_once() -> None:
    ranks = expert_ranks(plan({"ep": {"node": 2, "fabric": 2}}, shard=8, ep=4), cluster(node=4, fabric=2))
    assert along(ranks, EXPERT_AXES, "ep") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert along(ranks, EXPERT_AXES, "expert_shard") == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_experts_fold_the_ranks_of_tensor_parallelism_too() -> None:
    ranks = expert_ranks(plan(pp=2, shard=2, tp=2, ep=4))
    assert along(ranks, EXPERT_AXES, "ep") == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_mapped_axis_is_given_its_place_before_the_others() -> None:
    ranks = dense_ranks(plan({"shard": {"node": 4}}, shard=4, tp=2), cluster(node=4, fabric=2))
    assert along(ranks, DENSE_AXES, "shard")[0] == [0, 1, 2, 3]
    assert along(ranks, DENSE_AXES, "tp")[0] == [0, 4]


def test_fewer_ranks_than_chips_take_the_inner_levels_first() -> None:
    ranks = dense_ranks(plan(shard=8, tp=8), cluster(node=8, pod=16, fabric=4))
    assert ranks.reshape(-1).tolist() == list(range(64))


# --- levels filled in part


def level_of(ranks: RankArray, axes: tuple[str, ...], axis: str, network: Cluster) -> set[str]:
    """The levels that the groups of an axis cross."""
    return {innermost_common_level(group, ranks.size, network) for group in along(ranks, axes, axis)}


def test_sixteen_thousand_ranks_take_five_pods_and_a_third() -> None:
    h100 = load_cluster("h100-pod")
    made = plan(pp=16, replicate=16, shard=8, tp=8)
    ranks = dense_ranks(made, h100)
    assert ranks.reshape(-1).tolist() == list(range(16_384)), "the natural order: tp innermost, the pipeline outermost"
    assert [(band.name, band.ranks) for band in placement_levels(made, h100)] == [("node", 8), ("pod and fabric", 2048)]
    assert level_of(ranks, DENSE_AXES, "tp", h100) == {"node"}
    assert level_of(ranks, DENSE_AXES, "shard", h100) == {"pod"}
    # A stage of 128 nodes never lies across two pods of 384; of the pipeline's neighbours every third pair does.
    assert level_of(ranks, DENSE_AXES, "replicate", h100) == {"pod"}
    assert level_of(ranks, DENSE_AXES, "pp", h100) == {"fabric"}


def test_a_group_across_the_border_of_two_pods_crosses_the_fabric() -> None:
    h100 = load_cluster("h100-pod")
    ranks = dense_ranks(plan(pp=16, shard=100, tp=8), h100)
    assert along(ranks, DENSE_AXES, "shard")[0] == list(range(0, 800, 8)), "a shard group is a hundred nodes in a row"
    across = [
        stage for stage in range(16) if innermost_common_level(ranks[stage].reshape(-1), ranks.size, h100) == "fabric"
    ]
    # Pods end after nodes 384, 768, 1,152 and 1,536.
    assert across == [3, 7, 11, 15]


def test_a_mapping_splits_the_levels_that_are_filled_in_part() -> None:
    h100 = load_cluster("h100-pod")
    inside = plan({"tp": {"node": 8}, "pp": {"pod": 16}}, pp=16, replicate=16, shard=8, tp=8)
    assert [band.ranks for band in placement_levels(inside, h100)] == [8, 128, 16], (
        "blocks of 128 nodes, three of them a pod"
    )
    ranks = dense_ranks(inside, h100)
    assert level_of(ranks, DENSE_AXES, "pp", h100) == {"pod"}
    assert level_of(ranks, DENSE_AXES, "replicate", h100) == {"fabric"}
    with pytest.raises(PlacementError, match=r"`mapping.shard.pod` must divide the 128 free ranks there, but is 256"):
        dense_ranks(plan({"shard": {"pod": 256}}, pp=8, shard=256, tp=8), h100)


def test_some_chips_of_one_node_are_enough() -> None:
    assert dense_ranks(plan(shard=3), cluster(node=4, fabric=2)).reshape(-1).tolist() == [0, 1, 2]
    assert innermost_common_level([0, 2], 3, cluster(node=4, fabric=2)) == "node"


def test_nodes_hold_equal_numbers_and_levels_follow() -> None:
    network = cluster(node=4, pod=3, fabric=2)
    assert innermost_common_level([0, 1], 6, network) == "node", "two on each of three nodes"
    assert innermost_common_level([0, 2], 6, network) == "pod"
    assert innermost_common_level([0, 9], 10, network) == "fabric", (
        "two on each of five nodes, the fourth in the second pod"
    )


# --- errors


def test_ranks_that_find_no_node_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"5 ranks must .* at most 2 nodes of 4 .* take 5 nodes .* such as 4"):
        dense_ranks(plan(shard=5), cluster(node=4, fabric=2))
    with pytest.raises(PlacementError, match=r"must be at most the 8 chips of cluster 'made up', but is 16 instead"):
        dense_ranks(plan(shard=16), cluster(node=4, fabric=2))


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (
            {"tp": {"rack": 4}},
            r"`mapping.tp` must lie on levels node, fabric with .*product.* 4, but is \{'rack': 4\}",
        ),
        ({"tp": {"node": 2}}, r"product.* 4, but is \{'node': 2\}"),
        ({"tp": {"fabric": 4}}, r"`mapping.tp.fabric` must divide the 2 free ranks there, but is 4"),
        ({"shard": {"node": 2}, "tp": {"node": 4}}, r"`mapping.tp.node` must divide the 2 free ranks there"),
    ],
)
def test_a_mapping_that_does_not_fit_is_refused(mapping: dict[Axis, dict[str, int]], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        dense_ranks(plan(mapping, shard=2, tp=4), cluster(node=4, fabric=2))


def test_experts_that_do_not_fold_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"axis ep of 3 ranks .* a factor of 3 cannot be placed"):
        expert_ranks(plan(shard=8, ep=3))
    with pytest.raises(PlacementError, match=r"`mapping.ep.fabric` must divide the 1 free ranks there"):
        expert_ranks(plan({"ep": {"fabric": 2}}, pp=2, shard=4, ep=2), cluster(node=4, fabric=2))


# --- any plan on any network


def factors(number: int, pieces: int, dice: random.Random) -> list[int]:
    """A number as a product of `pieces` factors, in a random way."""
    made = [1] * pieces
    for prime in primes(number):
        made[dice.randrange(pieces)] *= prime
    return made


def primes(number: int) -> Iterable[int]:
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            yield divisor
            number //= divisor
        divisor += 1


def random_case(dice: random.Random) -> tuple[Plan, Cluster]:
    """A cluster, degrees that fill it, and for some of the dense axes a placement that leaves room for the others."""
    fanouts = [dice.choice([1, 2, 3, 4, 6, 8]) for _ in range(dice.randint(1, 3))]
    network = cluster(**{f"level{number}": fanout for number, fanout in enumerate(fanouts)})
    by_level = [factors(fanout, len(DENSE_AXES), dice) for fanout in fanouts]
    placed = {axis: [row[number] for row in by_level] for number, axis in enumerate(DENSE_AXES)}
    degrees = {axis: prod(row) for axis, row in placed.items()}
    folded = [prod(placed[axis][level] for axis in ("shard", "cp", "tp")) for level in range(len(fanouts))]
    experts = [dice.choice([size for size in range(1, ranks + 1) if ranks % size == 0]) for ranks in folded]
    chosen = [axis for axis in DENSE_AXES if dice.random() < 0.5]
    mapping: dict[Axis, dict[str, int]] = {}
    for axis in chosen:
        mapping[axis] = {f"level{level}": factor for level, factor in enumerate(placed[axis]) if factor > 1}
    if len(chosen) == len(DENSE_AXES):
        mapping["ep"] = {f"level{level}": factor for level, factor in enumerate(experts) if factor > 1}
    made = Plan(degrees=Degrees(**degrees, ep=prod(experts)), mapping={a: row for a, row in mapping.items() if row})
    return made, network


def test_every_plan_that_fits_places_every_rank_once_and_both_meshes_agree() -> None:
    dice = random.Random(20)
    mapped = 0
    for _ in range(400):
        made, network = random_case(dice)
        dense, expert = dense_ranks(made, network), expert_ranks(made, network)
        world = made.degrees.world
        assert dense.shape == tuple(getattr(made.degrees, axis) for axis in DENSE_AXES)
        assert expert.shape == tuple(getattr(made.degrees, axis) for axis in EXPERT_AXES)
        assert sorted(dense.reshape(-1)) == sorted(expert.reshape(-1)) == list(range(world))
        # A stage and a replica are the same ranks whichever way the rest is folded.
        for stage in range(made.degrees.pp):
            for replica in range(made.degrees.replicate):
                assert set(dense[stage, replica].reshape(-1)) == set(expert[stage, replica].reshape(-1))
        for rank in {0, world // 3, world - 1}:
            for layout, ranks in ((dense_layout(made, network), dense), (expert_layout(made, network), expert)):
                place = layout.coordinates(rank)
                assert ranks[tuple(place[axis] for axis in layout.axes)] == rank
                chosen = [axis for axis in layout.axes if dice.random() < 0.5]
                others = tuple(slice(None) if axis in chosen else place[axis] for axis in layout.axes)
                assert layout.ranks_along(rank, chosen).tolist() == ranks[others].tolist()
        for axis, where in made.mapping.items():
            assert_on_its_levels(expert if axis == "ep" else dense, axis, where, network)
            mapped += 1
    assert mapped > 300, "the cases must try mappings"


def assert_on_its_levels(ranks: RankArray, axis: str, where: dict[str, int], network: Cluster) -> None:
    """On every level, a group of the axis takes as many ranks as the mapping says."""
    sizes = [level.fanout for level in network.levels]
    for group in along(ranks, EXPERT_AXES if axis == "ep" else DENSE_AXES, axis):
        rest = np.array(group)
        for level, size in zip(network.levels, sizes, strict=True):
            assert len(set(rest % size)) == where.get(level.name, 1)
            rest = rest // size


def test_neighbours_on_the_innermost_axis_are_neighbours_on_the_network() -> None:
    dice = random.Random(21)
    for _ in range(200):
        made, network = random_case(dice)
        free = Plan(degrees=made.degrees)
        together = gcd(made.degrees.tp, network.levels[0].fanout)
        for group in along(dense_ranks(free, network), DENSE_AXES, "tp"):
            nodes = [rank // network.levels[0].fanout for rank in group]
            assert nodes.count(nodes[0]) == together
