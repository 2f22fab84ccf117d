"""Muon equals `torch.optim.Muon`; which parameters it moves, and which rank does which matrix."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from danlu.framework.decoder.decoder import Decoder
from danlu.framework.muon import Muon, adjusted_rate, orthogonalize
from danlu.framework.optimizer import MuonWithAdamW, build_optimizer
from danlu.framework.state import TrainState
from danlu.ops.newton_schulz import divide_work, newton_schulz_flops
from danlu.spec.catalog import catalog_entries
from danlu.spec.load import load_model
from danlu.spec.model import Model
from danlu.spec.parameters import decoder_parameters, is_hidden_matrix
from danlu.spec.recipe import OptimizerConfig, OptimizerGroup

SHAPES = ((64, 32), (32, 64), (48, 48), (7, 130))


def muon(parameters: list[nn.Parameter], **changes: Any) -> Muon:
    settings: dict[str, Any] = {
        "lr": 0.01,
        "weight_decay": 0.1,
        "momentum": 0.9,
        "nesterov": True,
        "steps": 5,
        "dtype": torch.bfloat16,
        "adjustment": "original",
    }
    return Muon(parameters, **(settings | changes))


@pytest.mark.parametrize(("nesterov", "adjustment"), [*product([True, False], ["original", "match_rms_adamw"])])
def test_every_bit_is_that_of_torch(nesterov: bool, adjustment: Any) -> None:
    torch.manual_seed(0)
    theirs = [nn.Parameter(torch.randn(shape) * 0.02) for shape in SHAPES]
    ours = [nn.Parameter(each.detach().clone()) for each in theirs]
    reference = torch.optim.Muon(
        theirs, lr=0.01, weight_decay=0.1, momentum=0.9, nesterov=nesterov, adjust_lr_fn=adjustment
    )
    made = muon(ours, nesterov=nesterov, adjustment=adjustment)
    for _ in range(4):
        for a, b in zip(theirs, ours, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        reference.step()
        made.step()
        for a, b in zip(theirs, ours, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(reference.state[a]["momentum_buffer"], made.state[b]["momentum_buffer"])


def test_singular_values_come_near_one() -> None:
    torch.manual_seed(1)
    for shape in SHAPES:
        found = torch.linalg.svdvals(orthogonalize(torch.randn(shape), 5))
        assert float(found.min()) > 0.6 and float(found.max()) < 1.3, shape
    assert torch.equal(orthogonalize(torch.zeros(4, 6), 5), torch.zeros(4, 6))


def test_an_expert_is_moved_as_a_linear_layer_of_its_own() -> None:
    """A stack has experts × inputs × outputs, the transpose of a linear layer's weight."""
    torch.manual_seed(2)
    stack = nn.Parameter(torch.randn(3, 16, 40) * 0.02)
    apart = [nn.Parameter(matrix.T.clone()) for matrix in stack.detach()]
    together, alone = muon([stack], dtype=torch.float32), muon(apart, dtype=torch.float32)
    for _ in range(3):
        stack.grad = torch.randn_like(stack)
        for expert, each in enumerate(apart):
            each.grad = stack.grad[expert].T.clone()
        together.step()
        alone.step()
    for expert, each in enumerate(apart):
        torch.testing.assert_close(stack[expert].T, each, rtol=0, atol=1e-6)


def test_the_rate_of_wide_and_tall_matrices() -> None:
    assert adjusted_rate(1.0, "original", outputs=400, inputs=100) == 2.0
    assert adjusted_rate(1.0, "original", outputs=100, inputs=400) == 1.0
    assert adjusted_rate(1.0, "match_rms_adamw", outputs=100, inputs=400) == pytest.approx(4.0)


SMALL = ("tiny-llama", "tiny-gpt", "tiny-moe")


def _models() -> list[Model]:
    changes: list[dict[str, Any]] = [{}, {"tied": True}, {"qk_norm": True}, {"qkv_bias": True}]
    return [load_model(name).model_copy(update=change) for name in SMALL for change in changes]


@pytest.mark.parametrize("model", _models(), ids=lambda model: model.name)
def test_parameters_are_known_without_building_the_model(model: Model) -> None:
    with torch.device("meta"):
        built = {name: tuple(each.shape) for name, each in Decoder(model).named_parameters()}
    assert dict(decoder_parameters(model)) == built


def test_the_catalog_has_the_models_of_this_file() -> None:
    assert set(SMALL) <= set(catalog_entries("models"))


@pytest.mark.parametrize("name", SMALL)
def test_muon_has_the_matrices_of_layers_and_nothing_else(name: str) -> None:
    decoder = Decoder(load_model(name))
    optimizer = build_optimizer([decoder], OptimizerConfig(kind="muon"), decoder.blocks.values())
    assert isinstance(optimizer, MuonWithAdamW)
    mine, theirs = ({id(p) for group in part.param_groups for p in group["params"]} for part in optimizer.parts)
    found = {name for name, p in decoder.named_parameters() if id(p) in mine}
    assert found == {name for name, p in decoder.named_parameters() if is_hidden_matrix(name, tuple(p.shape))}
    assert not mine & theirs
    assert len(mine | theirs) == len(list(decoder.parameters()))
    kinds = {name.split(".", 2)[-1] for name in found}
    assert {"attention.q.weight", "attention.o.weight", "mlp.down.weight"} <= kinds
    assert ("mlp.experts.down" in kinds) == (name == "tiny-moe")
    assert not any("norm" in kind or "router" in kind or "bias" in kind for kind in kinds)


def test_biases_of_experts_are_not_matrices() -> None:
    model = load_model("tiny-moe")
    assert model.moe is not None
    biased = model.model_copy(update={"moe": model.moe.model_copy(update={"bias": True})})
    decoder = Decoder(biased)
    optimizer = build_optimizer([decoder], OptimizerConfig(kind="muon"), decoder.blocks.values())
    assert isinstance(optimizer, MuonWithAdamW)
    mine = {id(p) for group in optimizer.parts[0].param_groups for p in group["params"]}
    names = {name: id(p) in mine for name, p in decoder.named_parameters() if "experts" in name}
    assert any(name.endswith("_bias") for name in names)
    assert all(is_mine != name.endswith("_bias") for name, is_mine in names.items()), names


def test_a_module_that_is_not_ours_gives_its_matrices_but_no_router() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.table, self.conv = nn.Embedding(3, 4), nn.Conv1d(2, 2, 3)

    block = Mixture()
    built = build_optimizer([block], OptimizerConfig(kind="muon"), [block])
    assert isinstance(built, MuonWithAdamW)
    names = {id(p): name for name, p in block.named_parameters()}
    found = {names[id(p)] for group in built.parts[0].param_groups for p in group["params"]}
    assert found == {"experts.0.weight", "experts.1.weight"}


def _state(optimizer: OptimizerConfig) -> TrainState:
    torch.manual_seed(3)
    decoder = Decoder(load_model("tiny-llama").model_copy(update={"layers": 1}))
    return TrainState([decoder], build_optimizer([decoder], optimizer, decoder.blocks.values()), seed=0)


def _step(state: TrainState, rate: float = 0.01) -> None:
    torch.manual_seed(state.step)
    for parameter in state.parameters():
        parameter.grad = torch.randn_like(parameter)
    state.optimizer_step(rate)
    state.next_step(samples=1)


def test_a_run_resumes_to_the_bit_with_one_momentum_for_a_matrix() -> None:
    straight, resumed = (_state(OptimizerConfig(kind="muon")) for _ in range(2))
    for _ in range(3):
        _step(straight)
    saved = {name: tensor.clone() for name, tensor in straight.tensors().items()}
    assert "optimizer.blocks.0.attention.q.weight.momentum_buffer" in saved
    assert "optimizer.blocks.0.attention.q.weight.exp_avg" not in saved
    assert "optimizer.embed.token.weight.exp_avg_sq" in saved
    before = [each.detach().clone() for each in resumed.parameters()]
    tensors = resumed.tensors()
    assert all(torch.equal(a, b) for a, b in zip(before, resumed.parameters(), strict=True)), "no state moves nothing"
    assert tensors.keys() == saved.keys()
    for name, tensor in tensors.items():
        tensor.detach().copy_(saved[name])
    resumed.restore_scalars(straight.scalars())
    for _ in range(2):
        _step(straight)
        _step(resumed)
    for name, tensor in resumed.tensors().items():
        assert torch.equal(tensor, straight.tensors()[name]), name


def test_groups_change_rate_decay_and_kind_and_the_last_match_wins() -> None:
    groups = (
        OptimizerGroup(match="blocks.*", weight_decay=0.7),
        OptimizerGroup(match="*.attention.q.weight", learning_rate_factor=0.5),
        OptimizerGroup(match="*.mlp.up.weight", kind="adamw"),
        OptimizerGroup(match="embed.*", learning_rate_factor=0.0),
    )
    state = _state(OptimizerConfig(kind="muon", groups=groups))
    names = {id(p): name for name, p in state.named_parameters()}
    _step(state, rate=0.2)
    found = {names[id(p)]: group for group in state.optimizer.param_groups for p in group["params"]}
    assert (found["blocks.0.attention.q.weight"]["lr"], found["blocks.0.attention.q.weight"]["weight_decay"]) == (
        0.1,
        0.1,
    )
    assert (found["blocks.0.attention.k.weight"]["lr"], found["blocks.0.attention.k.weight"]["weight_decay"]) == (
        0.2,
        0.7,
    )
    assert found["blocks.0.mlp_norm.weight"]["weight_decay"] == 0.7
    assert found["head.norm.weight"]["weight_decay"] == 0.0
    assert "momentum_buffer" not in state.tensors()
    keys = state.tensors().keys()
    assert "optimizer.blocks.0.mlp.up.weight.exp_avg" in keys
    assert "optimizer.blocks.0.mlp.down.weight.momentum_buffer" in keys
    frozen, moved = _state(OptimizerConfig()), state
    for (name, before), after in zip(frozen.named_parameters(), moved.parameters(), strict=True):
        assert torch.equal(before, after) == (name == "embed.token.weight"), name


def test_muon_for_one_group_alone() -> None:
    state = _state(OptimizerConfig(groups=(OptimizerGroup(match="*.mlp.up.weight", kind="muon"),)))
    keys = state.tensors().keys()
    assert [key for key in keys if "momentum_buffer" in key] == ["optimizer.blocks.0.mlp.up.weight.momentum_buffer"]
    assert "optimizer.blocks.0.mlp.down.weight.exp_avg" in keys


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_work_is_divided_evenly_in_bounded_rounds(ranks: int) -> None:
    shapes = ((64, 64), (16, 64), (16, 64), (64, 64), (64, 128), (64, 128), (128, 64)) * 12
    division = divide_work(shapes, ranks, 5, round_elements=10_000)
    flops = [newton_schulz_flops(*shape, 5) for shape in shapes]
    loads = [
        sum(cost for cost, owner in zip(flops, division.owner, strict=True) if owner == rank) for rank in range(ranks)
    ]
    assert max(loads) <= sum(flops) / ranks + max(flops), "the bound of longest-first"
    assert Counter(each for members in division.rounds for each in members) == Counter(range(len(shapes)))
    for members in division.rounds:
        held = Counter[int]()
        for each in members:
            held[division.owner[each]] += shapes[each][0] * shapes[each][1]
        assert all(size <= 10_000 for size in held.values())
    assert len(division.rounds) <= -(-len(shapes) // ranks) + 1
    assert divide_work(shapes, ranks, 5, 10_000) == division


def test_a_matrix_larger_than_a_round_has_one_of_its_own() -> None:
    division = divide_work(((100, 100), (10, 10), (10, 10)), 1, 5, round_elements=500)
    assert division.rounds == ((0,), (1, 2))
