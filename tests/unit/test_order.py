import tracemalloc

import numpy as np
import pytest

from danlu.storage.data.shuffle import MAX_SAMPLES, shuffled_indices


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 4096, 4097])
def test_every_epoch_visits_every_sample_once(size: int) -> None:
    for seed in (0, 1, 2**64 - 1):
        epochs = shuffled_indices(np.arange(3 * size), size, seed).reshape(3, size)
        assert (np.sort(epochs, axis=1) == np.arange(size)).all()


def test_one_index_alone_gives_what_the_whole_gives() -> None:
    whole = shuffled_indices(np.arange(3000), 1000, seed=5)
    alone = [int(shuffled_indices(np.array([index]), 1000, seed=5)[0]) for index in range(0, 3000, 37)]
    assert alone == whole[::37].tolist()


def test_order_stays_the_same_over_releases() -> None:
    """A run that resumes under a later release must read the samples it has not read yet."""
    assert shuffled_indices(np.arange(8), 1000, seed=0).tolist() == [865, 184, 199, 144, 236, 889, 158, 809]
    assert shuffled_indices(np.array([0, 10**15, 10**17]), 10**15, seed=42).tolist() == [
        440666097503200,
        744574293034729,
        536575288348512,
    ]


def test_seeds_and_epochs_have_their_own_orders() -> None:
    size = 1000
    orders = [shuffled_indices(np.arange(size), size, seed) for seed in range(10)]
    orders += [shuffled_indices(np.arange(epoch * size, (epoch + 1) * size), size, seed=0) for epoch in range(1, 10)]
    for first in range(len(orders)):
        for second in range(first):
            # two unrelated orders agree in one place on average; 12 would be a chance of 1 in 10^9
            assert (orders[first] == orders[second]).sum() < 12


@pytest.mark.parametrize("size", [5, 7, 16, 100])
def test_every_sample_is_equally_likely_at_every_position(size: int) -> None:
    epochs = 4000
    orders = shuffled_indices(np.arange(epochs * size), size, seed=1).reshape(epochs, size)
    counts = np.stack([np.bincount(orders[:, position], minlength=size) for position in range(size)])
    freedom = (size - 1) ** 2
    chi_square = ((counts - epochs / size) ** 2 / (epochs / size)).sum()
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)  # five standard deviations


def test_neighbours_are_as_far_apart_as_chance_puts_them() -> None:
    size, epochs = 12, 20000
    orders = shuffled_indices(np.arange(epochs * size), size, seed=2).reshape(epochs, size)
    steps = np.bincount((orders[:, 1] - orders[:, 0]) % size, minlength=size)[1:]
    chi_square = ((steps - epochs / (size - 1)) ** 2 / (epochs / (size - 1))).sum()
    assert chi_square < (size - 2) + 5 * np.sqrt(2 * (size - 2))


def test_a_huge_order_takes_no_memory() -> None:
    size = 10**15
    tracemalloc.start()
    found = shuffled_indices(np.arange(10**17, 10**17 + 1000), size, seed=3)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20
    assert len(set(found.tolist())) == 1000 and found.min() >= 0 and found.max() < size
    assert abs(found.mean() / size - 0.5) < 0.05


def test_the_largest_order_and_the_largest_index() -> None:
    found = shuffled_indices(np.array([0, 1, 2**63 - 1]), MAX_SAMPLES, seed=0)
    assert len(set(found.tolist())) == 3 and found.min() >= 0 and found.max() < MAX_SAMPLES


def test_shape_is_kept() -> None:
    assert shuffled_indices(np.arange(6).reshape(2, 3), 10, seed=0).shape == (2, 3)
    assert shuffled_indices(np.empty(0, dtype=np.int64), 10, seed=0).shape == (0,)


@pytest.mark.parametrize(
    ("index", "size", "seed"), [(0, 0, 0), (0, MAX_SAMPLES + 1, 0), (-1, 5, 0), (0, 5, -1), (0, 5, 2**64)]
)
def test_what_lies_outside_is_refused(index: int, size: int, seed: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        shuffled_indices(np.array([index]), size, seed)
