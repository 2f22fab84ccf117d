"""Cross-entropy of one rank; that of several is in tests/multiprocess/test_collectives.py."""

from typing import Any

import pytest
import torch

from danlu.parallel.batch import IGNORE_INDEX
from danlu.parallel.loss import cross_entropy_sum, linear_cross_entropy_sum
from danlu.torch_compat import TorchDispatchMode


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


def head(dtype: torch.dtype, vocabulary: int = 11) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(2, 5, 8, generator=generator), torch.randn(vocabulary, 8, generator=generator)
    targets = torch.randint(vocabulary, (2, 5), generator=generator)
    targets[0, 1] = IGNORE_INDEX
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


@pytest.mark.parametrize("chunks", [1, 2, 3, 11, 40])
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
)
def test_logits_in_parts_give_the_loss_and_gradients_of_all_at_once(
    dtype: torch.dtype, close: float, chunks: int
) -> None:
    x, weight, targets = head(dtype)
    expected = cross_entropy_sum(x @ weight.T, targets, None) * 0.25
    wanted = torch.autograd.grad(expected, (x, weight))
    loss = linear_cross_entropy_sum(x, weight, targets, None, chunks) * 0.25
    found = torch.autograd.grad(loss, (x, weight))
    torch.testing.assert_close(loss, expected, rtol=close, atol=close)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, rtol=close, atol=close)
    assert not found[0][0, 1].any(), "a position that does not count"


def test_parts_of_nothing_but_minus_infinity_add_nothing() -> None:
    x, targets = torch.ones(1, 3, 1), torch.tensor([[2, 2, 3]])
    weight = torch.tensor([[-torch.inf], [-torch.inf], [0.0], [1.0]])
    loss = linear_cross_entropy_sum(x, weight, targets, None, 4)
    assert loss.item() == pytest.approx(cross_entropy_sum(x @ weight.T, targets, None).item(), rel=1e-6)


def test_logits_far_above_those_of_other_parts_do_not_overflow() -> None:
    x, targets = torch.ones(1, 3, 1), torch.tensor([[0, 2, 3]])
    for values in ([-900.0, -800.0, 800.0, 900.0], [900.0, 800.0, -800.0, -900.0]):
        weight = torch.tensor(values)[:, None]
        for chunks in (2, 4):
            loss = linear_cross_entropy_sum(x, weight, targets, None, chunks)
            assert loss.item() == pytest.approx(cross_entropy_sum(x @ weight.T, targets, None).item(), rel=1e-6)


def test_logits_in_parts_see_targets_beyond_the_vocabulary() -> None:
    x, weight, targets = head(torch.float32)
    with pytest.raises(IndexError, match="out of bounds"):
        linear_cross_entropy_sum(x, weight, targets + 11, None, 3)


def test_of_logits_in_parts_one_is_in_memory() -> None:
    tokens, width, vocabulary, chunks = 256, 4, 4096, 8
    x, weight = torch.randn(1, tokens, width).requires_grad_(), torch.randn(vocabulary, width).requires_grad_()
    targets = torch.randint(vocabulary, (1, tokens))
    most = [0]

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **kwargs or {})
            for each in result if isinstance(result, tuple) else (result,):
                if isinstance(each, torch.Tensor):
                    most[0] = max(most[0], each.numel())
            return result

    with Largest():
        linear_cross_entropy_sum(x, weight, targets, None, chunks).backward()
    assert most[0] == tokens * vocabulary // chunks
