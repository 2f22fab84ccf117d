"""Which levels of the network a group of ranks is joined by."""

import pytest

from danlu.comm.rank_layout import level_blocks
from danlu.comm.world import _level_sizes


@pytest.mark.parametrize(
    ("fanouts", "blocks"), [((8,), ()), ((8, 4), ()), ((2, 2, 2), (4,)), ((8, 32, 4, 3), (256, 1024))]
)
def test_blocks_lie_between_the_host_and_the_whole(fanouts: tuple[int, ...], blocks: tuple[int, ...]) -> None:
    assert level_blocks(fanouts) == blocks


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
