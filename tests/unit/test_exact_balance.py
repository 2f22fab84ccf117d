"""Exact balance: every expert gets the same number of tokens, and little score is given up for it."""

from itertools import combinations, product

import pytest
import torch
from torch import Tensor

from danlu.framework.decoder.exact_balance import choose_evenly
from danlu.framework.decoder.moe import Router
from danlu.spec.model import Moe

SHAPES = ((64, 8, 2), (30, 8, 3), (5, 4, 4), (7, 5, 1), (3, 8, 2), (6, 6, 5), (1, 4, 2), (96, 16, 4))


def drawn(kind: str, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    if kind == "equal":
        return torch.full(shape, 0.5)
    favorite = 4 * torch.randn(shape[-1], generator=generator) if kind == "collapsed" else 0.0
    return (torch.randn(shape, generator=generator) + favorite).softmax(-1)


@pytest.mark.parametrize("kind", ["ordinary", "collapsed", "equal"])
@pytest.mark.parametrize(("length", "experts", "top_k"), SHAPES)
def test_all_experts_get_the_same_and_no_token_one_twice(kind: str, length: int, experts: int, top_k: int) -> None:
    chosen = choose_evenly(drawn(kind, 3, length, experts), top_k)
    assert chosen.shape == (3, length, top_k)
    assert all(len(set(row)) == top_k for row in chosen.flatten(0, 1).tolist())
    for sequence in chosen:
        load = sequence.flatten().bincount(minlength=experts)
        assert load.min() >= length * top_k // experts
        assert load.max() <= -(-length * top_k // experts)


def test_what_is_even_already_stays() -> None:
    scores = torch.full((1, 8, 4), 0.1)
    for token in range(8):
        scores[0, token, [token % 4, (token + 1) % 4]] = torch.tensor([0.5, 0.3])
    assert choose_evenly(scores, 2).tolist() == [[[token % 4, (token + 1) % 4] for token in range(8)]]


def test_little_is_given_up_against_the_best_of_all_even_choices() -> None:
    """Five tokens, two of four experts each: all even choices are tried."""
    shares = []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        scores = (torch.randn(4, 4, generator=generator) + torch.randn(4, generator=generator)).softmax(-1)
        pairs = list(combinations(range(4), 2))
        best = max(
            float(sum(scores[token, list(pair)].sum() for token, pair in enumerate(choice)))
            for choice in product(pairs, repeat=4)
            if all(sum(expert in pair for pair in choice) == 2 for expert in range(4))
        )
        shares.append(float(scores.gather(-1, choose_evenly(scores[None], 2)[0]).sum()) / best)
    assert min(shares) > 0.9
    assert sum(shares) / len(shares) > 0.98


@pytest.mark.parametrize(("kind", "optimum"), [("ordinary", 36.476465), ("collapsed", 29.804840)])
def test_a_sequence_keeps_nearly_all_that_an_even_choice_can_have(kind: str, optimum: float) -> None:
    """The optimum of the transport problem is from a linear program (HiGHS)."""
    scores = drawn(kind, 1, 96, 16)
    assert float(scores.gather(-1, choose_evenly(scores, 2)).sum()) > 0.999 * optimum


@pytest.mark.parametrize("broken", [(0, 3), (slice(None), slice(None))])
def test_scores_that_are_not_numbers_are_spread_evenly_too(broken: tuple[int | slice, int | slice]) -> None:
    """The step is skipped for them afterwards; until then nothing may hang or fail."""
    scores = drawn("collapsed", 1, 24, 8)
    scores[0][broken] = torch.nan
    assert choose_evenly(scores, 2).flatten().bincount(minlength=8).tolist() == [6] * 8


def test_no_place_in_the_sequence_is_favored() -> None:
    scores = drawn("collapsed", 1, 40, 8)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    assert torch.equal(choose_evenly(scores[:, order], 2), choose_evenly(scores, 2)[:, order])


def test_sequences_do_not_depend_on_each_other() -> None:
    scores = drawn("ordinary", 3, 20, 8)
    assert torch.equal(choose_evenly(scores[1:2], 2), choose_evenly(scores, 2)[1:2])


def test_a_router_balances_in_training_and_chooses_freely_in_evaluation() -> None:
    torch.manual_seed(0)
    router = Router(16, Moe(experts=8, top_k=2, width=4, balance="exact"))
    tokens = torch.randn(2, 32, 16) + 2 * torch.randn(16)
    chosen, weights, counts, loss = router(tokens)
    assert counts.tolist() == [16] * 8
    assert loss == 0
    weights.sum().backward()
    assert router.gate.weight.grad is not None
    free = router.eval()(tokens)
    assert free[2].max() > 16
    best = router.gate(tokens).topk(2, dim=-1).indices.flatten(0, 1)
    assert torch.equal(free[0], best)
    assert not torch.equal(chosen, best)


def test_exact_balance_needs_all_groups() -> None:
    with pytest.raises(ValueError, match="`balance` must not be exact"):
        Moe(experts=8, top_k=2, width=4, n_group=4, topk_group=2, balance="exact")
