"""The gradient's norm and its clipping on one rank; sharded gradients are in tests/multiprocess/test_collectives.py."""

import pytest
import torch
from torch import nn

from danlu.parallel.grad_norm import clip_grads_with_norm, local_squared_norm

CPU = torch.device("cpu")


def parameters(*gradients: list[float] | None) -> list[nn.Parameter]:
    made = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(2 if gradient is None else len(gradient)))
        parameter.grad = None if gradient is None else torch.tensor(gradient)
        made.append(parameter)
    return made


def test_squares_add_up_over_parameters_and_missing_gradients_count_nothing() -> None:
    assert local_squared_norm(parameters([1.0, 2.0], None, [3.0]), 1, CPU).item() == pytest.approx(14.0)
    assert local_squared_norm(parameters(None), 1, CPU).item() == 0


def test_a_gradient_that_every_rank_of_a_stage_holds_counts_for_its_part_in_each() -> None:
    assert local_squared_norm(parameters([3.0, 4.0]), 4, CPU).item() * 4 == pytest.approx(25.0)


def test_low_precision_gradients_are_added_up_in_fp32() -> None:
    parameter = nn.Parameter(torch.zeros(100_000, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    assert local_squared_norm([parameter], 1, CPU).item() == pytest.approx(100_000, rel=1e-4)


def test_infinity_and_nan_are_seen() -> None:
    assert local_squared_norm(parameters([float("inf"), 1.0]), 1, CPU).isinf()
    assert local_squared_norm(parameters([float("nan"), 1.0]), 1, CPU).isnan()


def test_a_long_gradient_is_scaled_to_the_limit_and_keeps_its_direction() -> None:
    made = parameters([3.0], None, [4.0])
    clip_grads_with_norm(made, 5.0, 0.5)
    assert [None if p.grad is None else p.grad.tolist() for p in made] == [
        [pytest.approx(0.3, rel=1e-5)],
        None,
        [pytest.approx(0.4, rel=1e-5)],
    ]


@pytest.mark.parametrize("limit", [0.0, 5.0, 6.0])
def test_a_short_gradient_and_a_limit_of_zero_leave_it_alone(limit: float) -> None:
    made = parameters([3.0, 4.0])
    clip_grads_with_norm(made, 5.0, limit)
    assert made[0].grad is not None and made[0].grad.tolist() == [3.0, 4.0]
