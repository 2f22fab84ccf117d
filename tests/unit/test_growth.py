import random
from collections import defaultdict

import numpy as np
import pytest

from danlu.storage.data.growing_shuffle import GrowingShuffle
from danlu.storage.data.shuffle import shuffled_indices

HORIZON = 400


def histories(count: int) -> list[list[tuple[int, int]]]:
    """Sources that grow now and then: before the first sample, twice at once, in and at the end of an epoch."""
    dice = random.Random(7)
    made = [[(0, 5), (0, 8)], [(0, 5), (5, 9)], [(0, 5), (3, 9), (3, 12)], [(0, 1), (1, 2), (2, 3), (3, 4)]]
    for _ in range(count):
        place, size = 0, dice.randint(1, 30)
        sizes = [(place, size)]
        for _ in range(dice.randint(1, 5)):
            place, size = place + dice.randint(0, 40), size + dice.randint(0, 20)
            sizes.append((place, size))
        made.append(sizes)
    return made


def test_without_growth_it_is_the_plain_order() -> None:
    assert (
        GrowingShuffle([(0, 37)], 5).sample_ids(np.arange(HORIZON)) == shuffled_indices(np.arange(HORIZON), 37, 5)
    ).all()


def test_every_epoch_holds_every_sample_once_whenever_it_grew() -> None:
    for seed, sizes in enumerate(histories(150)):
        order = GrowingShuffle(sizes, seed)
        samples = order.sample_ids(np.arange(HORIZON)).tolist()
        epochs: defaultdict[int, list[int]] = defaultdict(list)
        for place, sample in enumerate(samples):
            epoch, position = order.epoch_and_position(place)
            assert position == len(epochs[epoch])
            epochs[epoch].append(sample)
        under_way = epochs.pop(max(epochs))
        assert len(set(under_way)) == len(under_way), sizes
        assert all(sorted(epoch) == list(range(len(epoch))) for epoch in epochs.values()), sizes
        held = {len(epoch) for epoch in epochs.values()}
        assert held <= {size for _, size in sizes}


def test_growth_leaves_what_was_read_as_it_was() -> None:
    for seed, sizes in enumerate(histories(80)):
        whole = GrowingShuffle(sizes, seed).sample_ids(np.arange(HORIZON))
        for known in range(1, len(sizes)):
            before = np.arange(sizes[known][0])
            assert (GrowingShuffle(sizes[:known], seed).sample_ids(before) == whole[before]).all()


def test_what_is_new_is_spread_over_the_rest_of_the_epoch() -> None:
    samples = GrowingShuffle([(0, 1000), (500, 2000)], seed=1).sample_ids(np.arange(500, 2000))
    new = np.flatnonzero(samples >= 1000)
    assert len(new) == 1000 and 650 < new.mean() < 850


def test_one_place_alone_gives_what_the_whole_gives() -> None:
    order = GrowingShuffle([(0, 50), (30, 70), (60, 71), (333, 400)], seed=2)
    whole = order.sample_ids(np.arange(1000))
    assert [int(order.sample_ids(np.array([place]))[0]) for place in range(1000)] == whole.tolist()


def test_the_order_stays_the_same_over_releases() -> None:
    assert GrowingShuffle([(0, 6), (4, 10)], seed=0).sample_ids(np.arange(10)).tolist() == GROWN


GROWN = [0, 4, 5, 1, 8, 2, 7, 6, 9, 3]


@pytest.mark.parametrize("sizes", [[], [(1, 5)], [(0, 0)], [(0, 5), (3, 4)], [(0, 5), (9, 7), (8, 9)]])
def test_what_does_not_grow_is_refused(sizes: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="must"):
        GrowingShuffle(sizes, seed=0)
