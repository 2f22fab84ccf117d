"""Rotary positions: pairs that are neighbors, and YaRN against transformers' own tables."""

import math
from typing import Any

import pytest
import torch

from danlu.framework.decoder.rope import apply_rope, rope_frequencies
from danlu.spec.model import Model, RopeScaling

CPU = torch.device("cpu")
DEEPSEEK: dict[str, Any] = {"factor": 40.0, "original": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
GPT_OSS: dict[str, Any] = {"factor": 32.0, "original": 4096, "truncate": False}
YARN: dict[str, tuple[float, dict[str, Any]]] = {
    "deepseek v3": (10_000.0, DEEPSEEK),
    "deepseek v2, two weights": (10_000.0, DEEPSEEK | {"mscale": 0.707, "mscale_all_dim": 0.5}),
    "gpt-oss": (150_000.0, GPT_OSS),
    "its own factor and bounds": (
        500_000.0,
        {"factor": 4.0, "original": 512, "low": 2.0, "high": 16.0, "attention_factor": 1.3},
    ),
    "a short context, all pairs slowed": (10_000.0, {"factor": 8.0, "original": 4}),
}
HF_KEYS = {"original": "original_max_position_embeddings", "low": "beta_slow", "high": "beta_fast"}


@pytest.mark.parametrize("name", YARN)
@pytest.mark.parametrize("width", [8, 64])
def test_yarn_is_the_yarn_of_transformers_to_the_last_bit(name: str, width: int) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theta, values = YARN[name]
    table = {HF_KEYS.get(key, key): value for key, value in values.items()}
    config = transformers.LlamaConfig(
        hidden_size=4 * width,
        num_attention_heads=4,
        max_position_embeddings=2**17,
        rope_parameters={"rope_type": "yarn", "rope_theta": theta} | table,
    )
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config, CPU)
    scaling = RopeScaling(kind="yarn", **values)
    assert torch.equal(rope_frequencies(width, theta, scaling, CPU), expected)
    assert scaling.rotary_factor == factor
    assert scaling.rotary_factor != 1.0 or values.get("mscale") == values.get("mscale_all_dim") is not None


def test_yarn_scales_what_it_rotates() -> None:
    x = torch.randn(1, 5, 2, 8, generator=torch.Generator().manual_seed(0))
    plain = RopeScaling(kind="yarn", factor=8.0, original=16, attention_factor=1.0)
    louder = plain.model_copy(update={"attention_factor": None})
    expected = apply_rope(x, 10_000.0, plain) * (1 + 0.1 * math.log(8.0))
    torch.testing.assert_close(apply_rope(x, 10_000.0, louder), expected)


def test_interleaved_pairs_are_neighbors() -> None:
    """Every pair is one complex number; products of queries and keys follow."""
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 6, 1, 8, generator=generator) for _ in range(2))
    speeds = torch.tensor([100.0 ** (-pair / 4) for pair in range(4)])
    turn = torch.polar(torch.ones(6, 4), torch.outer(torch.arange(6.0), speeds))
    complex_q, complex_k = (torch.view_as_complex(x.unflatten(-1, (4, 2)))[0, :, 0] * turn for x in (q, k))
    expected = (complex_q @ complex_k.conj().T).real
    turned_q, turned_k = (apply_rope(x, 100.0, interleaved=True)[0, :, 0] for x in (q, k))
    torch.testing.assert_close(turned_q @ turned_k.T, expected, rtol=1e-4, atol=1e-5)
    halves = apply_rope(q, 100.0)[0, :, 0] @ apply_rope(k, 100.0)[0, :, 0].T
    assert (halves - expected).abs().max() > 0.1, "halves are other pairs"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"factor": 8.0, "original": 64, "mscale": 1.0}, '`mscale` has an effect for kind "yarn" only'),
        ({"factor": 8.0, "original": 64, "truncate": False}, '`truncate` has an effect for kind "yarn" only'),
        ({"kind": "yarn", "factor": 8.0, "original": 64, "mscale": 1.0}, "must be given together"),
        ({"kind": "yarn", "factor": 8.0, "original": 64, "low": 40.0}, "`high` must be above `low`"),
    ],
)
def test_settings_without_effect_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeScaling.model_validate(values)


def test_yarn_needs_rotations_that_differ() -> None:
    values = {"vocabulary": 8, "layers": 1, "width": 8, "heads": 2, "rope_theta": 1.0}
    with pytest.raises(ValueError, match="`rope_theta` must be above 1"):
        Model.model_validate(values | {"rope_scaling": {"kind": "yarn", "factor": 2.0, "original": 8}})


def test_bounds_have_the_default_of_their_kind() -> None:
    assert RopeScaling(kind="yarn", factor=8.0, original=64).high == 32.0
    assert RopeScaling(factor=8.0, original=64).high == 4.0
