"""Times of collectives over levels, against the formulas by hand."""

import pytest

from danlu.cost.collectives import (
    Link,
    Network,
    all_gather,
    all_reduce,
    all_to_all,
    dispatch_once,
    network_of,
    transfer,
)
from danlu.spec.load import load_cluster

NODE, FABRIC = Link(8, 300e9, 0.0), Link(64, 25e9, 0.0)
TWO = Network((NODE, FABRIC), 0.0)
GIGA = 1e9


def test_groups_lie_where_their_ranks_do() -> None:
    assert TWO.span(8, 1) == (8, 1)
    assert TWO.span(16, 1) == (8, 2)
    assert TWO.span(8, 8) == (1, 8)
    assert TWO.span(8, 2) == (4, 2)
    assert Network((NODE, FABRIC, Link(512, 25e9, 0.0)), 0.0).span(32, 4) == (2, 8, 2)


def test_inside_a_node_a_ring() -> None:
    assert all_gather(TWO, (8, 1), GIGA) == pytest.approx(GIGA * 7 / 8 / 300e9)
    assert all_reduce(TWO, (8, 1), GIGA) == pytest.approx(2 * GIGA * 7 / 8 / 300e9)


def test_across_nodes_a_chip_sends_its_share() -> None:
    # what eight chips of a node have gathered is sent once, an eighth by each
    assert all_gather(TWO, (8, 4), GIGA) == pytest.approx(GIGA / 8 * 3 / 4 / 25e9)
    assert all_reduce(TWO, (1, 8), GIGA) == pytest.approx(2 * GIGA * 7 / 8 / 25e9)


def test_all_to_all_is_not_divided_by_a_hierarchy() -> None:
    assert all_to_all(TWO, (8, 4), GIGA) == pytest.approx(GIGA * 24 / 32 / 25e9)
    assert all_to_all(TWO, (8, 1), GIGA) == pytest.approx(GIGA * 7 / 8 / 300e9)


def test_a_token_is_sent_once_a_node() -> None:
    # eight nodes, eight experts a token: 7 · (1 − (7/8)⁸) = 4.6 copies cross where seven did
    once = dispatch_once(TWO, (8, 8), 1.0, GIGA, 8)
    assert once == pytest.approx(GIGA * 7 * (1 - (7 / 8) ** 8) / 25e9)
    assert once < all_to_all(TWO, (8, 8), 8 * GIGA)


def test_a_token_is_sent_once_a_rank() -> None:
    # inside one node: 4.6 sends where an all-to-all of every expert's copy takes seven
    inside = dispatch_once(TWO, (8, 1), 1.0, GIGA, 8)
    assert inside == pytest.approx(GIGA * 7 * (1 - (7 / 8) ** 8) / 300e9)
    assert inside < all_to_all(TWO, (8, 1), 8 * GIGA)
    assert dispatch_once(TWO, (8, 1), 1.0, GIGA, 1) == pytest.approx(all_to_all(TWO, (8, 1), GIGA))
    assert dispatch_once(TWO, (1, 1), 1.0, GIGA, 8) == 0.0


def test_a_group_may_drive_one_adapter_only() -> None:
    narrow = Network((NODE, Link(64, 25e9, 0.0, ring=25e9)), 0.0)
    assert all_reduce(narrow, (1, 8), GIGA) == all_reduce(TWO, (1, 8), GIGA)
    assert all_reduce(narrow, (8, 4), GIGA) == pytest.approx(8 * all_reduce(TWO, (8, 4), GIGA))
    assert all_gather(narrow, (8, 4), GIGA) == pytest.approx(GIGA * 3 / 4 / 25e9)


def test_latency_grows_with_the_ring_and_a_tree_bounds_it() -> None:
    slow = Network((Link(8, 300e9, 2e-6), Link(8192, 25e9, 5e-6)), 20e-6)
    assert all_gather(slow, (8, 1), 0.0) == pytest.approx(20e-6 + 7 * 2e-6)
    assert all_reduce(slow, (1, 1024), 0.0) == pytest.approx(20e-6 + 2 * 10 * 5e-6)


def test_a_group_of_one_takes_no_time() -> None:
    assert all_gather(TWO, (1, 1), GIGA) == all_reduce(TWO, (1, 1), GIGA) == all_to_all(TWO, (1, 1), GIGA) == 0.0


def test_neighbours_use_the_level_that_joins_them() -> None:
    assert transfer(TWO, 0, GIGA) == pytest.approx(GIGA / 300e9)
    assert transfer(TWO, 1, GIGA) == pytest.approx(GIGA / 25e9)


def test_oversubscription_narrows_a_level() -> None:
    pod = network_of(load_cluster("h100-pod"), inner=1.0, outer=0.5, start=0.0)
    assert [link.capacity for link in pod.links] == [8, 3072, 24576]
    assert pod.links[2].bandwidth == pytest.approx(50e9 * 0.5 / 7)
