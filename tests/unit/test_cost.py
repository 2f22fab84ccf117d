"""Counts against published totals, and by hand where a model is small."""

import pytest
import torch

from danlu.cost import (
    count_active_parameters,
    count_embedding_parameters,
    count_layer_parameters,
    count_parameters,
    flops_per_token,
)
from danlu.framework.decoder.decoder import Decoder
from danlu.spec.load import load_model
from danlu.spec.model import Model, Moe

MLP = 4 * 10
TINY = Model(vocabulary=100, layers=3, width=4, heads=2, mlp_width=10, sequence=7)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("llama3-8b", 8.03e9, 8.03e9),
        ("llama3-70b", 70.6e9, 70.6e9),
        ("llama3-405b", 405.9e9, 405.9e9),
        ("gpt3-175b", 174.6e9, 174.6e9),
        ("mixtral-8x7b", 46.7e9, 12.9e9),
        ("mixtral-8x22b", 140.6e9, 39.1e9),
        ("deepseek-v3-like", 671e9, 37e9),
        ("deepseek-v3", 671e9, 37.5e9),
        ("bagualu-14t-like", 14.5e12, 3.92e9),
    ],
)
def test_published_totals(name: str, total: float, active: float) -> None:
    model = load_model(name)
    assert count_parameters(model) == pytest.approx(total, rel=0.002)
    assert count_active_parameters(model) == pytest.approx(active, rel=0.004)


def test_llama3_8b_to_the_last_parameter() -> None:
    assert count_parameters(load_model("llama3-8b")) == 8_030_261_248


def test_deepseek_v3_to_the_last_parameter() -> None:
    """The published files also have a bias for every routed expert, which is a buffer here."""
    assert count_parameters(load_model("deepseek-v3")) + 58 * 256 == 671_026_419_200


def test_by_hand() -> None:
    layer = 4 * 4 * 4 + 3 * MLP + 2 * 4
    assert count_parameters(TINY) == 3 * layer + 2 * 100 * 4 + 4


def test_biases_norms_and_positions_by_hand() -> None:
    model = TINY.model_copy(update={"norm": "layer", "position": "learned", "activation": "gelu", "bias": True})
    layer = (4 * 4 * 4 + 4 * 4) + (2 * MLP + 10 + 4) + 2 * 8
    assert count_parameters(model) == 3 * layer + 2 * 100 * 4 + 7 * 4 + 8
    assert count_embedding_parameters(model) == (100 + 7) * 4


def test_biases_of_queries_keys_and_values_and_norms_of_heads() -> None:
    model = TINY.model_copy(update={"qkv_bias": True, "qk_norm": True, "kv_heads": 1})
    plain = TINY.model_copy(update={"kv_heads": 1})
    assert count_parameters(model) - count_parameters(plain) == 3 * ((4 + 2 + 2) + 2 * 2)
    with torch.device("meta"):
        assert count_parameters(model) == sum(parameter.numel() for parameter in Decoder(model).parameters())


def test_grouped_heads_and_a_head_width_of_its_own() -> None:
    model = TINY.model_copy(update={"kv_heads": 1, "head_width": 6})
    assert count_layer_parameters(model, 0).attention == 4 * 12 + 2 * 4 * 6 + 12 * 4


def test_tied_saves_the_head_and_not_its_work() -> None:
    tied = TINY.model_copy(update={"tied": True})
    assert count_parameters(TINY) - count_parameters(tied) == 100 * 4
    assert flops_per_token(tied, 16) == flops_per_token(TINY, 16)


def test_experts_by_hand() -> None:
    moe = Moe(experts=8, top_k=2, width=5, shared=3, dense_layers=1)
    model = TINY.model_copy(update={"moe": moe, "bias": True})
    dense, expert = count_layer_parameters(model, 0), count_layer_parameters(model, 1)
    assert dense.total == dense.active == (4 * 4 * 4 + 4 * 4) + (3 * MLP + 10 + 10 + 4) + 2 * 4
    assert (expert.mlp, expert.router, expert.expert) == (3 * 4 * 15, 8 * 4, 3 * 4 * 5)
    assert expert.total - expert.active == (8 - 2) * 3 * 4 * 5
    outside = 2 * 100 * 4 + 4
    assert count_parameters(model) == outside + dense.total + 2 * expert.total
    assert count_active_parameters(model) == outside + dense.active + 2 * expert.active


def test_flops_are_six_a_multiplied_parameter_and_causal_attention() -> None:
    layer = 4 * 4 * 4 + 3 * MLP + 2 * 4
    assert flops_per_token(TINY, 0) == 6 * (3 * layer + 4 + 100 * 4)
    assert flops_per_token(TINY, 16) - flops_per_token(TINY, 0) == 6 * 3 * 2 * 2 * 16


def test_counts_are_those_of_the_model_that_is_built() -> None:
    for name in ("tiny-llama", "tiny-gpt", "tiny-moe"):
        with torch.device("meta"):
            built = Decoder(load_model(name))
        assert sum(parameter.numel() for parameter in built.parameters()) == count_parameters(load_model(name))
