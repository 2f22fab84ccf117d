import tracemalloc

import numpy as np
import pytest

from danlu.spec.mixture_weights import integer_weights
from danlu.storage.data.mixture_sampler import MixtureSampler

WEIGHTS = [(1,), (1, 1), (7, 3), (1, 100), (3, 1, 4, 1, 5), (20, 1, 1, 1, 1, 1, 1, 1, 9)]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_every_source_is_dealt_its_samples_in_order_without_a_gap(weights: tuple[int, ...], seed: int) -> None:
    sources, numbers = MixtureSampler(weights, seed).locate(np.arange(3000))
    for source in range(len(weights)):
        mine = numbers[sources == source]
        assert (mine == np.arange(len(mine))).all()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_shares_are_exact_in_every_window(weights: tuple[int, ...]) -> None:
    sources, _ = MixtureSampler(weights, seed=4).locate(np.arange(3000))
    depth = int(np.ceil(np.log2(len(weights))))
    for source, weight in enumerate(weights):
        ahead = np.cumsum([0, *(sources == source)]) - np.arange(3001) * weight / sum(weights)
        assert ahead.max() - ahead.min() <= depth + 1e-9, "the windows between any two samples"
    whole = sum(weights)
    periods = sources[: 3000 // whole * whole].reshape(-1, whole)
    assert all(((periods == source).sum(axis=1) == weight).all() for source, weight in enumerate(weights))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_how_many_came_before_is_told_without_counting(weights: tuple[int, ...]) -> None:
    mixture = MixtureSampler(weights, seed=9)
    sources, _ = mixture.locate(np.arange(500))
    for cursor in range(501):
        counted = [int((sources[:cursor] == source).sum()) for source in range(len(weights))]
        assert [mixture.count_before(source, cursor) for source in range(len(weights))] == counted


def test_far_out_it_is_as_exact_and_takes_no_memory() -> None:
    mixture, far = MixtureSampler((2**30, 2**30 - 1, 1), seed=3), 10**18
    tracemalloc.start()
    sources, numbers = mixture.locate(np.arange(far, far + 4096))
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    tracemalloc.stop()
    assert sum(mixture.count_before(source, far) for source in range(3)) == far
    for source in (0, 1):
        mine = numbers[sources == source]
        assert (mine == mixture.count_before(source, far) + np.arange(len(mine))).all()
    assert abs(mixture.count_before(0, far) - far * 2**30 // 2**31) <= 1


def test_the_deal_stays_the_same_over_releases() -> None:
    sources, numbers = MixtureSampler((7, 3), seed=0).locate(np.arange(12))
    assert sources.tolist() == DEALT
    assert numbers[-1] == DEALT[:-1].count(DEALT[-1])


DEALT = [0, 0, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0]


def test_seeds_begin_elsewhere_in_the_period() -> None:
    assert len({tuple(MixtureSampler((7, 3), seed).locate(np.arange(10))[0].tolist()) for seed in range(40)}) > 3


def test_weights_are_taken_as_written() -> None:
    assert integer_weights([0.7, 0.3]) == (7, 3)
    assert integer_weights([70, 30.0]) == (7, 3)
    assert integer_weights([0.1, 0.2, 0.7]) == (1, 2, 7)
    assert integer_weights([1e-3, 2]) == (1, 2000)
    assert integer_weights([5]) == (1,)


def test_weights_that_cannot_be_dealt_are_refused() -> None:
    for weights in ((), (1, 0), (2**31, 1)):
        with pytest.raises(ValueError, match="`weights` must be 1 or more"):
            MixtureSampler(weights, seed=0)
