"""The state of a run: what it holds, and that going on from it is going on."""

import pytest
import torch
from torch import Tensor, nn

from danlu.framework.optimizer import build_optimizer
from danlu.framework.state import TrainState
from danlu.spec.recipe import OptimizerConfig


def state(seed: int = 7) -> TrainState:
    """Two parts, as a rank with two pipeline stages has them."""
    torch.manual_seed(seed)
    first = nn.ModuleDict({"embed": nn.Linear(4, 4)})
    second = nn.ModuleDict({"blocks": nn.ModuleDict({"3": nn.Linear(4, 2, bias=False)})})
    second.register_buffer("load", torch.zeros(3), persistent=False)
    second.register_buffer("bias", torch.zeros(3))
    parts: list[nn.Module] = [first, second]
    return TrainState(parts, build_optimizer(parts, OptimizerConfig(learning_rate=0.1)), seed)


def take_step(made: TrainState, rate: float = 0.1) -> None:
    """A step whose gradient depends on the step alone, and on the random numbers of it."""
    made.seed_step(data_index=0)
    for parameter in made.parameters():
        parameter.grad = torch.randn(parameter.shape)
    made.optimizer_step(rate)
    made.next_step(samples=8)


def copied(made: TrainState) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in made.tensors().items()}


def test_every_tensor_has_a_global_name() -> None:
    names = set(state().tensors())
    matrices = {"embed.weight", "embed.bias", "blocks.3.weight"}
    expected = {f"model.{name}" for name in (*matrices, "bias")}
    expected |= {f"optimizer.{name}.{key}" for name in matrices for key in ("step", "exp_avg", "exp_avg_sq")}
    assert names == expected, "buffers that are not part of the model stay out"


def test_asking_for_the_tensors_of_a_fresh_state_changes_nothing() -> None:
    made, untouched = state(), state()
    tensors = copied(made)
    for name, parameter in untouched.named_parameters():
        assert torch.equal(tensors[f"model.{name}"], parameter)
    assert all(tensor.abs().sum() == 0 for name, tensor in tensors.items() if name.startswith("optimizer."))
    assert all(parameter.grad is None for parameter in made.parameters())
    take_step(made)
    take_step(untouched)
    for name, parameter in untouched.named_parameters():
        assert torch.equal(made.tensors()[f"model.{name}"], parameter), "the first step is the same as without asking"


def test_a_state_that_is_restored_goes_on_as_if_it_had_never_stopped() -> None:
    straight = state()
    for _ in range(3):
        take_step(straight)
    tensors, scalars = copied(straight), straight.scalars()

    resumed = state()
    with torch.no_grad():
        for parameter in resumed.parameters():
            parameter.fill_(99.0)
    for name, tensor in resumed.tensors().items():
        tensor.detach().copy_(tensors[name])
    resumed.restore_scalars(scalars)
    assert (resumed.step, resumed.cursor) == (3, 24)
    for _ in range(3):
        take_step(straight)
        take_step(resumed)
    expected = straight.tensors()
    for name, tensor in resumed.tensors().items():
        assert torch.equal(tensor, expected[name]), name
    assert resumed.scalars() == straight.scalars()


def test_a_step_that_is_skipped_moves_the_data_and_not_the_parameters() -> None:
    made = state()
    before = copied(made)
    for parameter in made.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    made.next_step(samples=8)
    assert (made.step, made.cursor) == (1, 8)
    assert all(parameter.grad is None for parameter in made.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.tensors().items())


def test_the_learning_rate_of_a_step_holds_for_every_parameter() -> None:
    made, still = state(), state()
    take_step(made, rate=0.0)
    for parameter, before in zip(made.parameters(), still.parameters(), strict=True):
        assert torch.equal(parameter, before), "a step of rate zero goes nowhere"
    assert {group["lr"] for group in made.optimizer.param_groups} == {0.0}


def test_random_numbers_are_those_of_seed_step_and_rank() -> None:
    def draw(seed: int, step: int, rank: int) -> float:
        made = state(seed)
        made.step = step
        made.seed_step(rank)
        return float(torch.rand(()))

    assert draw(1, 5, 2) == draw(1, 5, 2)
    others = [draw(1, 5, 3), draw(1, 6, 2), draw(2, 5, 2), draw(0, 0, 0)]
    assert len({draw(1, 5, 2), *others}) == 5


def test_a_checkpoint_of_another_order_of_the_data_is_refused() -> None:
    made = state()
    with pytest.raises(ValueError, match=r"`seed` must be that of the checkpoint \(8\), but is 7"):
        made.restore_scalars(made.scalars() | {"seed": 8})
    assert made.step == 0
