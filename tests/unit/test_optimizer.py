"""The learning rate over a run, and what weight decay touches."""

from itertools import pairwise
from math import cos, pi
from typing import Any

import pytest
import torch

from danlu.framework.decoder.decoder import Decoder
from danlu.framework.optimizer import build_optimizer, learning_rate
from danlu.spec.load import load_model
from danlu.spec.recipe import LRSchedule, OptimizerConfig

STEPS = 100


def rates(steps: int = STEPS, **schedule: Any) -> list[float]:
    """The factor of every step of a run."""
    optimizer, shape = OptimizerConfig(learning_rate=1.0), LRSchedule.model_validate(schedule)
    return [learning_rate(step, steps, optimizer, shape) for step in range(steps)]


def falls(values: list[float]) -> bool:
    return all(later < earlier for earlier, later in pairwise(values))


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear", "wsd"])
def test_warm_up_climbs_in_even_steps_from_above_zero_to_the_full_rate(kind: str) -> None:
    found = rates(kind=kind, warmup=20)
    assert found[:20] == pytest.approx([(step + 1) / 20 for step in range(20)])
    assert found[20] == 1.0
    assert max(found) == 1.0


def test_constant_stays() -> None:
    assert rates(kind="constant") == [1.0] * STEPS


@pytest.mark.parametrize("kind", ["cosine", "linear"])
@pytest.mark.parametrize("final", [0.0, 0.1])
def test_decay_begins_at_the_full_rate_and_reaches_its_end_as_the_run_does(kind: str, final: float) -> None:
    found = rates(kind=kind, warmup=10, final=final)
    assert found[10] == 1.0 and falls(found[10:])
    # The step after the last would have the final factor: the schedule ends with the run, not one step before.
    last = learning_rate(
        STEPS, STEPS, OptimizerConfig(learning_rate=1.0), LRSchedule(kind=kind, warmup=10, final=final)
    )  # type: ignore[arg-type]
    assert last == pytest.approx(final)
    assert found[-1] == pytest.approx(final, abs=0.02)
    assert found[55] == pytest.approx((1 + final) / 2), "half of the way down in the middle"


def test_cosine_and_linear_have_their_shapes() -> None:
    assert rates(kind="linear", final=0.0)[25] == pytest.approx(0.75)
    assert rates(kind="cosine", final=0.0)[25] == pytest.approx((1 + cos(pi / 4)) / 2)


def test_wsd_is_stable_until_its_decay_and_falls_in_a_line() -> None:
    found = rates(kind="wsd", warmup=5, decay=40, final=0.2)
    assert found[5:61] == [1.0] * 56
    assert falls(found[60:])
    assert found[80] == pytest.approx(0.6)
    assert rates(kind="wsd", warmup=5, final=0.2)[89:92] == pytest.approx([1.0, 1.0, 0.92]), "a tenth when left out"
    assert rates(kind="wsd", decay=0) == [1.0] * STEPS


def test_a_run_of_warm_up_alone_never_leaves_it() -> None:
    assert rates(steps=4, kind="cosine", warmup=4) == [0.25, 0.5, 0.75, 1.0]
    assert rates(steps=1, kind="cosine") == [1.0]


def test_the_rate_scales_with_the_optimizer_and_depends_on_nothing_but_the_step() -> None:
    optimizer, schedule = OptimizerConfig(learning_rate=3e-4), LRSchedule(kind="cosine", warmup=10)
    straight = [learning_rate(step, STEPS, optimizer, schedule) for step in range(STEPS)]
    assert straight[10] == 3e-4
    assert [learning_rate(step, STEPS, optimizer, schedule) for step in reversed(range(STEPS))] == straight[::-1]


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-moe"])
def test_weight_decay_spares_vectors_and_every_parameter_is_in_one_group(name: str) -> None:
    model = Decoder(load_model(name))
    built = build_optimizer([model], OptimizerConfig(weight_decay=0.3, beta1=0.8, beta2=0.9, epsilon=1e-7))
    decay = {id(p): group["weight_decay"] for group in built.param_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in built.param_groups) == len(decay) == len(list(model.parameters()))
    for parameter_name, parameter in model.named_parameters():
        vector = "norm" in parameter_name or parameter_name.endswith(".bias")
        assert decay[id(parameter)] == (0.0 if vector else 0.3), parameter_name
    assert built.defaults["betas"] == (0.8, 0.9) and built.defaults["eps"] == 1e-7


def test_without_a_gradient_a_matrix_shrinks_and_a_vector_stays() -> None:
    layer = torch.nn.Linear(3, 2)
    before = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    built = build_optimizer([layer], OptimizerConfig(learning_rate=0.5, weight_decay=0.1))
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    built.step()
    torch.testing.assert_close(layer.weight.detach(), before["weight"] * 0.95)
    assert torch.equal(layer.bias.detach(), before["bias"])
