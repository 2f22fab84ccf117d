"""Which levels of the network a group of ranks is joined by."""

import pytest

from danlu.comm.rank_layout import common_level, level_spans, network_spans
from danlu.comm.world import _level_sizes
from danlu.spec import load_cluster


def test_ranks_are_numbered_along_the_levels() -> None:
    levels = level_spans([("node", 8), ("pod", 32), ("fabric", 4)])
    assert [level.ranks for level in levels] == [8, 256, 1024]
    crossed = [levels[common_level(5, other, levels)].name for other in (5, 7, 8, 255, 256, 1023)]
    assert crossed == ["node", "node", "pod", "pod", "fabric", "fabric"]


def test_nodes_that_are_not_full_hold_as_many_ranks_each() -> None:
    pod = load_cluster("h100-pod")  # nodes of 8
    assert network_spans(pod, 12)[0].ranks == 4
    assert network_spans(None, 12) == ()


@pytest.mark.parametrize(
    ("ranks", "hosts_of", "block", "sizes"),
    [
        (range(8), 2, 4, [2, 2, 2]),
        (range(4), 2, 4, [2, 2]),  # in one block
        (range(0, 8, 2), 2, 4, [2, 2]),  # one on each host
        ((0, 4), 2, 4, [2]),  # one in each block
        ((0, 1, 4, 5), 2, 4, [2, 2]),  # a host of each block
        ((0, 1, 2, 4, 5, 6), 2, 4, [3, 2]),  # hosts do not hold as many each; blocks do
        ((0, 1, 2, 4), 2, 4, [4]),  # neither
        (range(6), 2, 4, [2, 3]),  # the last block is half full
    ],
)
def test_a_level_counts_if_its_units_hold_as_many_ranks(
    ranks: tuple[int, ...], hosts_of: int, block: int, sizes: list[int]
) -> None:
    assert _level_sizes([[rank // hosts_of for rank in ranks], [rank // block for rank in ranks]]) == sizes
