"""Sliding windows, sinks and softcaps: what attention sees, position by position, and what it costs."""

from math import exp, tanh
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.cost import count_parameters, flops_per_token
from danlu.framework.decoder.attention import Documents
from danlu.framework.decoder.decoder import Decoder
from danlu.framework.decoder.score_attention import attend_by_scores
from danlu.ops.attention import causal_pairs, computed_pairs, mask_bytes
from danlu.ops.layer_shard import LayerShard
from danlu.ops.model_shape import model_shape
from danlu.spec import Model
from danlu.spec.parameters import decoder_parameters

SHAPE: dict[str, Any] = {"vocabulary": 61, "layers": 6, "width": 32, "heads": 4, "kv_heads": 2, "sequence": 64}
SINKS = {"window": 5, "global_every": 3, "sinks": True, "score_softcap": 3.0}
GEMMA = {"window": 5, "qk_norm": True, "zero_centered_norm": True, "post_norms": True, "activation": "geglu"}


def model(**changes: Any) -> Model:
    return Model.model_validate(SHAPE | changes)


def decoder(**changes: Any) -> Decoder:
    made = Decoder(model(**changes))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return made


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(61, (rows, length), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("window", [1, 3, 8, 12, None])
def test_a_token_sees_the_latest_of_its_document(window: int | None) -> None:
    positions = torch.tensor([[*range(5), *range(7)], [*range(12)]])
    document = (positions == 0).cumsum(1)
    documents = Documents.from_positions(positions, window)
    sequence = Documents.causal(12, torch.device("cpu"), window)
    packed, alone = documents.with_mask(torch.bfloat16).mask_B1SS, sequence.with_mask(torch.float32).mask_B1SS
    assert packed.shape == (2, 1, 12, 12) and alone.shape == (1, 1, 12, 12)
    assert packed.dtype == torch.bfloat16 and alone.dtype == torch.float32
    for query in range(12):
        for key in range(12):
            near = key <= query and (window is None or query - key < window)
            assert alone[0, 0, query, key] == (0.0 if near else -torch.inf)
            assert near == (sequence.first_BS[0, query] <= key <= query)
            for row in range(2):
                visible = near and document[row, key] == document[row, query]
                assert packed[row, 0, query, key] == (0.0 if visible else -torch.inf)
                assert visible == (documents.first_BS[row, query] <= key <= query)


def test_scores_without_sinks_and_cap_are_the_fused_kernel() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 9, 8, generator=generator) for heads in (4, 2, 2))
    mask = Documents.causal(9, torch.device("cpu"), 4).with_mask(torch.float32).mask_B1SS
    found = attend_by_scores(q, k, v, mask, scale=0.3, softcap=None, sinks_H=None)
    fused = F.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)
    assert torch.allclose(found, fused, atol=1e-6)


def test_scores_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 6, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    sinks = torch.randn(4, generator=generator, dtype=torch.float64)
    mask = Documents.causal(6, torch.device("cpu"), 3).with_mask(torch.float32).mask_B1SS
    found = attend_by_scores(q, k, v, mask, scale=0.5, softcap=1.5, sinks_H=sinks)
    for head in range(4):
        for query in range(6):
            seen = range(max(0, query - 2), query + 1)
            scores = [float(q[0, head, query] @ k[0, head // 2, key]) * 0.5 for key in seen]
            raised = [exp(1.5 * tanh(score / 1.5)) for score in scores]
            total = sum(raised) + exp(float(sinks[head]))
            expected = sum(share * v[0, head // 2, key] for share, key in zip(raised, seen, strict=True)) / total
            assert torch.allclose(found[0, head, query], expected, atol=1e-5)


@torch.no_grad()
def test_a_window_as_long_as_the_sequence_changes_no_bit() -> None:
    expected = decoder()(tokens(2, 12))
    assert torch.equal(decoder(window=12)(tokens(2, 12)), expected)
    assert not torch.equal(decoder(window=11)(tokens(2, 12)), expected)


@pytest.mark.parametrize("changes", [{"window": 5, "global_every": 2}, SINKS, GEMMA])
@torch.no_grad()
def test_documents_with_windows_are_as_if_alone(changes: dict[str, Any]) -> None:
    made = decoder(**changes)
    first, second = tokens(1, 9), tokens(1, 16)[:, 5:]
    together = made(torch.cat((first, second), dim=1), torch.tensor([[*range(9), *range(11)]]))
    alone = torch.cat((made(first), made(second)), dim=1)
    assert torch.allclose(together, alone, atol=1e-4 * float(alone.abs().max()))


def test_layers_with_a_window() -> None:
    def windows(**changes: Any) -> list[int | None]:
        made = model(window=5, **changes)
        assert [made.layer_window(layer) for layer in range(6)] == [
            5 if model_shape(made).is_local_layer(layer) else None for layer in range(6)
        ]
        return [made.layer_window(layer) for layer in range(6)]

    assert windows() == [5] * 6
    assert windows(global_every=3) == [5, 5, None] * 2
    assert windows(global_first=4) == [None] * 4 + [5] * 2
    assert windows(global_first=1, global_every=2) == [None, None, 5, None, 5, None]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"global_every": 2}, "`global_every` has no effect without `window`"),
        ({"global_first": 1}, "`global_first` has no effect without `window`"),
        ({"local_rope_theta": 300.0}, "`local_rope_theta` has no effect without `window`"),
        ({"window": 4, "global_first": 6}, "leave no layer with a window"),
        ({"window": 4, "local_rope_theta": 300.0, "position": "learned"}, '`position` must be "rope"'),
        ({"zero_centered_norm": True, "norm": "layer"}, '`norm` must be "rms"'),
        ({"rope_scaling": {"kind": "linear", "factor": 2.0, "original": 64}}, "have no effect with kind"),
        ({"rope_scaling": {"factor": 2.0}}, "`original` must be given"),
    ],
)
def test_what_has_no_effect_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        model(**changes)


@pytest.mark.parametrize("changes", [SINKS, GEMMA, {"window": 4, "bias": True}])
def test_parameters_are_those_of_the_decoder(changes: dict[str, Any]) -> None:
    made = decoder(**changes)
    described = dict(decoder_parameters(model(**changes)))
    assert described == {name: tuple(parameter.shape) for name, parameter in made.named_parameters()}
    assert count_parameters(model(**changes)) == sum(parameter.numel() for parameter in made.parameters())


@pytest.mark.parametrize("window", [0, 1, 4, 10, 11, 64])
def test_pairs_are_those_of_the_mask(window: int) -> None:
    seen = torch.ones(11, 11, dtype=torch.bool).tril()
    if window:
        seen &= ~torch.ones(11, 11, dtype=torch.bool).tril(-window)
    assert causal_pairs(11, 11, window) == int(seen.sum())


def test_a_window_needs_and_computes_fewer_pairs() -> None:
    """Not so where scores are in memory: there a mask is too, and every pair is computed."""
    plain, windowed, mixed = (model(**changes) for changes in ({}, {"window": 8}, {"window": 8, "global_every": 2}))
    core = 12.0 * 4 * 8 / 64
    saved = flops_per_token(plain, 64) - flops_per_token(windowed, 64)
    assert saved == pytest.approx(core * 6 * (causal_pairs(64, 64) - causal_pairs(64, 64, 8)), rel=0.05)
    assert flops_per_token(plain, 64) - flops_per_token(mixed, 64) == pytest.approx(saved / 2)
    shard = LayerShard(model_shape(mixed), sequences=3, length=64)
    for documents in (False, True):
        assert computed_pairs(shard, local=True, documents=documents) == causal_pairs(64, 64, 8)
        assert computed_pairs(shard, local=False, documents=documents) == 64**2 / 2
        assert computed_pairs(shard._replace(length=8), local=True, documents=documents) == 8**2 / 2
        assert mask_bytes(shard, 2, documents=documents) == 0.0
    assert computed_pairs(shard._replace(cp=4), local=False, documents=True) == 64**2 / 2 / 4
    ring = shard._replace(cp=4, ring=True)
    assert computed_pairs(ring, local=False, documents=True) == (1 + 1 / 4) * 64**2 / 2 / 4
    assert computed_pairs(ring, local=False, documents=False) == 64**2 / 2 / 4
    capped = shard._replace(model=model_shape(model(window=8, global_every=2, score_softcap=3.0)))
    assert computed_pairs(capped, local=True, documents=False) == 64**2
    assert mask_bytes(capped, 2, documents=False) == 2 * 2 * 64**2
    assert mask_bytes(capped, 2, documents=True) == 2 * 2 * 3 * 64**2
    everywhere = capped._replace(model=model_shape(model(window=8, score_softcap=3.0)))
    assert mask_bytes(everywhere, 2, documents=True) == 2 * 3 * 64**2
