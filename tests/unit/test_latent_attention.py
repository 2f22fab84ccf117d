"""Latent attention: against its definition, its documents, its cache, its cost, and the settings it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from danlu.cli.app import app
from danlu.cost import count_parameters
from danlu.cost.parameter_count import flops_per_token
from danlu.framework.decoder.attention import Documents
from danlu.framework.decoder.decoder import Decoder
from danlu.framework.decoder.latent_attention import LATENT_NORM_EPSILON, LatentAttention
from danlu.framework.decoder.parallelism import decoder_tp_plan
from danlu.ops import attention
from danlu.ops.layer_shard import LayerShard
from danlu.ops.model_shape import model_shape
from danlu.spec.load import load_model
from danlu.spec.model import MLAConfig, Model
from danlu.spec.parameters import decoder_parameters, is_hidden_matrix

RANKS: dict[str, Any] = {
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
}
YARN = {"kind": "yarn", "factor": 8.0, "original": 16, "mscale": 1.0, "mscale_all_dim": 0.6}
VARIANTS: dict[str, dict[str, Any]] = {
    "latent": {},
    "queries direct": {"mla": RANKS | {"q_lora_rank": None}},
    "values wider than keys": {"mla": RANKS | {"v_head_dim": 14}},
    "values as wide as keys": {"mla": RANKS | {"v_head_dim": 10}},
    "scaled positions": {"rope_scaling": YARN},
}


def tiny(**changes: Any) -> Model:
    values = {"vocabulary": 19, "layers": 2, "width": 16, "heads": 3, "mlp_width": 24, "sequence": 16, "mla": RANKS}
    return Model.model_validate(values | changes)


def made(model: Model) -> LatentAttention:
    attention = LatentAttention(model).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5 + 0.1)
    return attention


def stream(length: int = 9) -> Tensor:
    return torch.randn(2, length, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_definition(model: Model, layer: LatentAttention, xs: Tensor) -> Tensor:
    """One sequence, one head and one pair of positions at a time."""
    mla = model.mla
    assert mla is not None
    weights = {name: weight.detach() for name, weight in layer.named_parameters()}
    speeds = torch.tensor(
        [model.rope_theta ** (-2 * i / mla.qk_rope_head_dim) for i in range(mla.qk_rope_head_dim // 2)]
    )
    if model.rope_scaling is not None:
        from danlu.framework.decoder.rope import rope_frequencies

        speeds = rope_frequencies(mla.qk_rope_head_dim, model.rope_theta, model.rope_scaling, torch.device("cpu"))

    def norm(name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean() + LATENT_NORM_EPSILON).sqrt() * weights[f"{name}.weight"]

    def turned(x: Tensor, place: int) -> Tensor:
        """Two neighbors are one complex number."""
        number = torch.view_as_complex(x.unflatten(0, (-1, 2)).contiguous())
        factor = model.rope_scaling.rotary_factor if model.rope_scaling else 1.0
        return (
            torch.view_as_real(number * torch.polar(torch.ones_like(speeds), place * speeds).to(number)).flatten()
            * factor
        )

    queries, keys, values = [], [], []
    for place, x in enumerate(xs):
        if mla.q_lora_rank:
            q = weights["q_b.weight"] @ norm("q_a_norm", weights["q_a.weight"] @ x)
        else:
            q = weights["q.weight"] @ x
        down = weights["kv_a.weight"] @ x
        shared = turned(down[mla.kv_lora_rank :], place)
        up = weights["kv_b.weight"] @ norm("kv_a_norm", down[: mla.kv_lora_rank])
        heads_q, heads_kv = q.view(model.heads, -1), up.view(model.heads, -1)
        nope = mla.qk_nope_head_dim
        queries.append([torch.cat((each[:nope], turned(each[nope:], place))) for each in heads_q])
        keys.append([torch.cat((each[:nope], shared)) for each in heads_kv])
        values.append([each[nope:] for each in heads_kv])
    scale = mla.qk_head_dim**-0.5 * (model.rope_scaling.score_factor if model.rope_scaling else 1.0)
    rows = []
    for here in range(len(xs)):
        parts = []
        for head in range(model.heads):
            scores = torch.stack([queries[here][head] @ keys[there][head] for there in range(here + 1)]) * scale
            shares = scores.softmax(0)
            parts.append(sum(share * values[there][head] for there, share in enumerate(shares)))
        rows.append(weights["o.weight"] @ torch.cat(parts))  # type: ignore[arg-type]
    return torch.stack(rows)


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_its_definition(variant: str) -> None:
    model = tiny(**VARIANTS[variant])
    layer, x = made(model), stream()
    expected = torch.stack([by_definition(model, layer, row) for row in x])
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", ["latent", "values wider than keys"])
def test_documents_do_not_see_each_other(variant: str) -> None:
    layer, x = made(tiny(**VARIANTS[variant])), stream()
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2)
    found = layer(x, Documents.from_positions(positions))
    expected = torch.cat((layer(x[:, :4]), layer(x[:, 4:])), dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert (found - layer(x)).abs().max() > 1e-3


def test_the_cache_keeps_the_latent_and_the_shared_key_alone() -> None:
    layer = made(tiny())
    cache = layer.new_cache(2, 9)
    x = stream()
    found = torch.cat([layer.extend(piece, cache) for piece in x.split([4, 1, 3, 1], dim=1)], dim=1)
    torch.testing.assert_close(found, layer(x), rtol=1e-6, atol=1e-7)
    held = sum(tensor.numel() for tensor in vars(cache).values() if isinstance(tensor, Tensor))
    assert held == 2 * 9 * (10 + 4)
    assert held < 2 * 9 * 3 * (10 + 8), "keys and values of all heads"


@pytest.mark.parametrize("changes", [{}, {"mla": RANKS | {"q_lora_rank": None}}])
def test_parameters_are_counted_and_named_without_a_model(changes: dict[str, Any]) -> None:
    model = tiny(**changes)
    with torch.device("meta"):
        found = {name: tuple(parameter.shape) for name, parameter in Decoder(model).named_parameters()}
    named = {parameter.name: parameter.shape for parameter in decoder_parameters(model)}
    assert named == found
    assert count_parameters(model) == sum(torch.Size(shape).numel() for shape in found.values())
    matrices = {name for name, shape in named.items() if is_hidden_matrix(name, shape) and ".1.attention." in name}
    names = ("q_a", "q_b", "kv_a", "kv_b", "o") if model.mla and model.mla.q_lora_rank else ("q", "kv_a", "kv_b", "o")
    assert matrices == {f"blocks.1.attention.{name}.weight" for name in names}


def test_every_part_has_its_place_under_tensor_parallelism() -> None:
    with torch.device("meta"):
        plan = decoder_tp_plan(Decoder(tiny()), regathered=[0, 1])
    found = {name.removeprefix("blocks.0.attention."): style for name, style in plan.items() if "0.attention." in name}
    assert found == {
        "q_a": "sequence",
        "q_a_norm": "sequence",
        "kv_a": "sequence",
        "kv_a_norm": "sequence",
        "inputs": "joint gather",
        "q_b": "joint column",
        "kv_b": "joint column",
        "o": "row",
    }
    assert "blocks.0.attention" not in plan, "its input stays sharded"


def test_flops_are_those_of_the_published_shape_by_hand() -> None:
    """Of DeepSeek-V3's attention: five products, and heads of 192 and 128."""
    shape = model_shape(load_model("deepseek-v3"))
    down, up = 7168 * (1536 + 576), 128 * (1536 * 192 + 512 * 256) + 128 * 128 * 7168
    assert attention.parameters(shape) == down + up
    shard = LayerShard(shape, 1, 4096)
    assert sum(each.flops for each in attention.matmuls(shard)) == 2 * 4096 * (down + up)
    tensor_parallel = attention.matmuls(shard._replace(tp=8))
    assert 8 * sum(each.flops for each in tensor_parallel) == 2 * 4096 * (down + up)
    assert attention.input_width(shape) == 1536 + 512 + 64
    model = load_model("deepseek-v3")
    longer = flops_per_token(model, 4097) - flops_per_token(model, 4096)
    assert longer == pytest.approx(6 * 61 * 128 * (192 + 128) / 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, "`kv_heads` must be omitted for latent attention"),
        ({"head_width": 8}, "`head_width` must be omitted for latent attention"),
        ({"qk_norm": True}, "`qk_norm` must be false for latent attention"),
        ({"bias": True}, "`bias` must be false for latent attention"),
        ({"qkv_bias": True}, "`qkv_bias` must be false for latent attention"),
        ({"sinks": True}, "`sinks` must be false for latent attention"),
        ({"window": 8}, "`window` must be omitted for latent attention"),
        ({"zero_centered_norm": True}, "`zero_centered_norm` must be false for latent attention"),
        ({"position": "learned"}, '`position` must be "rope" for latent attention'),
        ({"mla": RANKS | {"qk_rope_head_dim": 5}}, "`qk_rope_head_dim` must be even"),
    ],
)
def test_settings_of_other_attention_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


def test_width_need_not_be_a_multiple_of_heads() -> None:
    assert tiny(heads=3).head_dim == 10
    assert tiny(heads=3).v_head_dim == 8
    assert MLAConfig(**RANKS).qk_head_dim == 10


# --- the commands


RECIPE = """name = "latent"
steps = 10

[model]
base = "tiny-mla"

[data]
shards = "none"

[batch]
sequences = 16
length = 64
"""


def _run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_plan_check_and_dry_run_know_latent_attention(tmp_path: Path) -> None:
    recipe, plan = tmp_path / "latent.toml", tmp_path / "plan.toml"
    recipe.write_text(RECIPE)
    machine = ("--cluster", "h100-pod")
    code, shown, said = _run(
        "plan", str(recipe), *machine, "--chips", "8", "--fix", "tp=2,pp=1,cp=1", "--output", str(plan), "--json"
    )
    assert code == 0, said
    best = json.loads(shown)["best"][0]
    assert best["parts"]["tensor"] > 0
    code, shown, said = _run("dryrun", str(recipe), *machine, "--plan", str(plan), "--json")
    assert code == 0, said
    ops = json.dumps(json.loads(shown))
    assert "attention.kv_b" in ops or "kv_b" in ops


def test_a_degree_that_does_not_divide_the_heads_is_refused(tmp_path: Path) -> None:
    recipe, plan = tmp_path / "latent.toml", tmp_path / "plan.toml"
    recipe.write_text(RECIPE)
    plan.write_text("[degrees]\ntp = 16\n")
    code, _, said = _run("check", str(recipe), "--cluster", "h100-pod", "--plan", str(plan))
    assert code != 0
    assert "`model.heads` (8)" in said
