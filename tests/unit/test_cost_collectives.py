"""Times of collectives over levels, against the formulas by hand."""

import pytest

from danlu.cost.collectives import (
    Link,
    Network,
    all_gather_time,
    all_reduce_time,
    all_to_all_time,
    build_network,
    dedup_dispatch_time,
    level_dispatch_times,
    p2p_time,
    reduce_scatter_time,
    wire_bytes,
)
from danlu.cost.measured_times import CollectiveTimes
from danlu.spec.cluster import CollectiveCurve
from danlu.spec.load import load_cluster

NODE, FABRIC = Link(8, 300e9, 0.0), Link(64, 25e9, 0.0)
TWO = Network((NODE, FABRIC), 0.0)
GIGA = 1e9


def test_groups_lie_where_their_ranks_do() -> None:
    assert TWO.group_shape(8, 1) == (8, 1)
    assert TWO.group_shape(16, 1) == (8, 2)
    assert TWO.group_shape(8, 8) == (1, 8)
    assert TWO.group_shape(8, 2) == (4, 2)
    assert Network((NODE, FABRIC, Link(512, 25e9, 0.0)), 0.0).group_shape(32, 4) == (2, 8, 2)


def test_inside_a_node_a_ring() -> None:
    assert all_gather_time(TWO, (8, 1), GIGA) == pytest.approx(GIGA * 7 / 8 / 300e9)
    assert all_reduce_time(TWO, (8, 1), GIGA) == pytest.approx(2 * GIGA * 7 / 8 / 300e9)


def test_across_nodes_a_chip_sends_its_share() -> None:
    # what eight chips of a node have gathered is sent once, an eighth by each
    assert all_gather_time(TWO, (8, 4), GIGA) == pytest.approx(GIGA / 8 * 3 / 4 / 25e9)
    assert all_reduce_time(TWO, (1, 8), GIGA) == pytest.approx(2 * GIGA * 7 / 8 / 25e9)


def test_all_to_all_is_not_divided_by_a_hierarchy() -> None:
    assert all_to_all_time(TWO, (8, 4), GIGA) == pytest.approx(GIGA * 24 / 32 / 25e9)
    assert all_to_all_time(TWO, (8, 1), GIGA) == pytest.approx(GIGA * 7 / 8 / 300e9)


def test_a_token_is_sent_once_a_node() -> None:
    # eight nodes, eight experts a token: 7 · (1 − (7/8)⁸) = 4.6 copies cross where seven did
    once = dedup_dispatch_time(TWO, (8, 8), 1.0, GIGA, 8)
    assert once == pytest.approx(GIGA * 7 * (1 - (7 / 8) ** 8) / 25e9)
    assert once < all_to_all_time(TWO, (8, 8), 8 * GIGA)


def test_a_token_is_sent_once_a_rank() -> None:
    # inside one node: 4.6 sends where an all-to-all of every expert's copy takes seven
    inside = dedup_dispatch_time(TWO, (8, 1), 1.0, GIGA, 8)
    assert inside == pytest.approx(GIGA * 7 * (1 - (7 / 8) ** 8) / 300e9)
    assert inside < all_to_all_time(TWO, (8, 1), 8 * GIGA)
    assert dedup_dispatch_time(TWO, (8, 1), 1.0, GIGA, 1) == pytest.approx(all_to_all_time(TWO, (8, 1), GIGA))
    assert dedup_dispatch_time(TWO, (1, 1), 1.0, GIGA, 8) == 0.0


def test_a_token_pays_for_the_levels_that_its_group_spans() -> None:
    """A slow level above the group costs nothing; one that it crosses carries what leaves its own part."""
    slow = Network((*TWO.links, Link(6400, TWO.links[1].bandwidth / 100, 0.0)), TWO.collective_latency)
    assert dedup_dispatch_time(slow, (8, 8, 1), 1.0, GIGA, 8) == dedup_dispatch_time(TWO, (8, 8), 1.0, GIGA, 8)
    nodes = 16
    beyond = (nodes - 8) * (1 - (1 - 1 / nodes) ** 8) * GIGA / slow.links[2].bandwidth
    assert dedup_dispatch_time(slow, (8, 8, 2), 1.0, GIGA, 8) == pytest.approx(beyond, rel=0.01)


def test_level_by_level_a_token_crosses_each_level_once_for_every_unit_that_needs_it() -> None:
    """With more experts than units all are needed: a copy to each of 8 nodes, and there to each of 8 chips."""
    across, inside = level_dispatch_times(TWO, (8, 8), 1.0, GIGA, 10**6)
    assert across == pytest.approx(7 * GIGA / TWO.links[1].bandwidth, rel=0.01)
    assert inside == pytest.approx(8 * 7 * GIGA / TWO.links[0].bandwidth, rel=0.01)
    one = level_dispatch_times(TWO, (8, 8), 1.0, GIGA, 1)  # one expert: one copy, 7 of 8 times to another node
    for seconds, link in zip(one, reversed(TWO.links), strict=True):
        assert seconds == pytest.approx(7 / 8 * GIGA / link.bandwidth, rel=0.01)
    node = level_dispatch_times(TWO, (8, 1), 1.0, GIGA, 1)
    assert node == (pytest.approx(7 / 8 * GIGA / TWO.links[0].bandwidth, rel=0.01), 0.0)
    assert level_dispatch_times(TWO, (1, 1), 1.0, GIGA, 8) == (0.0, 0.0)


def test_a_group_may_drive_one_adapter_only() -> None:
    narrow = Network((NODE, Link(64, 25e9, 0.0, ring_bandwidth=25e9)), 0.0)
    assert all_reduce_time(narrow, (1, 8), GIGA) == all_reduce_time(TWO, (1, 8), GIGA)
    assert all_reduce_time(narrow, (8, 4), GIGA) == pytest.approx(8 * all_reduce_time(TWO, (8, 4), GIGA))
    assert all_gather_time(narrow, (8, 4), GIGA) == pytest.approx(GIGA * 3 / 4 / 25e9)


def test_latency_grows_with_the_ring_and_a_tree_bounds_it() -> None:
    slow = Network((Link(8, 300e9, 2e-6), Link(8192, 25e9, 5e-6)), 20e-6)
    assert all_gather_time(slow, (8, 1), 0.0) == pytest.approx(20e-6 + 7 * 2e-6)
    assert all_reduce_time(slow, (1, 1024), 0.0) == pytest.approx(20e-6 + 2 * 10 * 5e-6)


def test_a_group_of_one_takes_no_time() -> None:
    assert (
        all_gather_time(TWO, (1, 1), GIGA)
        == all_reduce_time(TWO, (1, 1), GIGA)
        == all_to_all_time(TWO, (1, 1), GIGA)
        == 0.0
    )


def test_neighbours_use_the_level_that_joins_them() -> None:
    assert p2p_time(TWO, 0, GIGA) == pytest.approx(GIGA / 300e9)
    assert p2p_time(TWO, 1, GIGA) == pytest.approx(GIGA / 25e9)


def test_oversubscription_narrows_a_level() -> None:
    pod = build_network(load_cluster("h100-pod"), inner=1.0, outer=0.5, start=0.0)
    assert [link.capacity for link in pod.links] == [8, 3072, 24576]
    assert pod.links[2].bandwidth == pytest.approx(50e9 * 0.5 / 7)


@pytest.mark.parametrize(
    ("operation", "sent"),
    [
        ("all_gather", 7 * GIGA),  # its own part, and six others passed on
        ("reduce_scatter", GIGA * 7 / 8),
        ("all_reduce", 2 * GIGA * 7 / 8),
        ("all_to_all", GIGA * 7 / 8),
        ("broadcast", GIGA * 7 / 8),
        ("send", GIGA),
        ("receive", 0.0),
    ],
)
def test_bytes_on_the_wire_are_those_of_rings(operation: str, sent: float) -> None:
    assert wire_bytes(operation, 8, GIGA) == pytest.approx(sent)


def test_a_collective_whose_traffic_is_unknown_is_refused() -> None:
    with pytest.raises(ValueError, match="'scatter'"):
        wire_bytes("scatter", 8, GIGA)


def test_an_algorithm_is_priced_by_its_name_and_the_library_takes_the_fastest() -> None:
    network = Network((Link(64, 25e9, latency=1e-6),), 0.0)
    ring, tree = (all_reduce_time(network, (64,), 1.0, algorithm=each) for each in ("ring", "tree"))
    assert ring == pytest.approx(2 * 63 * 1e-6, rel=1e-3)
    assert tree == pytest.approx(2 * 6 * 1e-6, rel=1e-3)
    assert all_reduce_time(network, (64,), 1.0) == tree
    assert all_gather_time(network, (64,), 1.0, "ring") == all_gather_time(network, (64,), 1.0)
    with pytest.raises(ValueError, match="all_to_all must be library or direct, but is tree"):
        all_to_all_time(network, (64,), 1.0, "tree")


def test_measured_times_are_those_of_the_library_alone() -> None:
    curve = CollectiveCurve(operation="all_gather", ranks=8, sizes=(1.0, 1e9), seconds=(1.0, 1.0))
    network = Network((Link(8, 300e9, 0.0, measured=CollectiveTimes((curve,))),), 0.0)
    assert all_gather_time(network, (8,), GIGA) == pytest.approx(1.0)
    assert reduce_scatter_time(network, (8,), GIGA) == pytest.approx(1.0), "not measured by itself"
    for timed in (all_gather_time, reduce_scatter_time):
        assert timed(network, (8,), GIGA, "ring") == pytest.approx(GIGA * 7 / 8 / 300e9)
