"""Cross-entropy of one rank; that of several is in tests/multiprocess/test_collectives.py."""

import pytest
import torch

from danlu.parallel.loss import cross_entropy_sum


def test_it_is_the_sum_over_all_positions() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, targets = torch.randn(2, 5, 11, generator=generator), torch.randint(11, (2, 5), generator=generator)
    expected = -sum(scores[b, s].log_softmax(0)[targets[b, s]] for b in range(2) for s in range(5))
    assert cross_entropy_sum(scores, targets, None).item() == pytest.approx(float(expected), rel=1e-5)


def test_it_is_taken_in_fp32_whatever_the_scores_are_in() -> None:
    scores = torch.full((1, 3000, 4), 0.5).bfloat16().requires_grad_()
    loss = cross_entropy_sum(scores, torch.zeros(1, 3000, dtype=torch.int64), None)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(3000 * torch.tensor(4.0).log().item(), rel=1e-5), "bf16 would stop at 2048"
    loss.backward()
    assert scores.grad is not None and scores.grad.dtype == torch.bfloat16


def test_a_target_beyond_the_vocabulary_is_an_error() -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        cross_entropy_sum(torch.zeros(1, 1, 4), torch.tensor([[4]]), None)
