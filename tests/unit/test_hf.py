"""Hugging Face in and out: the same logits as transformers, the same bits after a round trip, and what is refused."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from made_hf import LLAMA3, MODELS, make_hf
from typer.testing import CliRunner

from danlu.cli.app import app
from danlu.cli.run_checkpoint import choose_step, parse_run_step
from danlu.cost import count_parameters
from danlu.framework.hf.compare import LOGIT_TOLERANCE, compare_logits, load_decoder, load_imported_decoder
from danlu.framework.hf.convert import MODEL_FILE, export_hf, import_hf
from danlu.framework.weights import WEIGHTS_FILE_PREFIX, load_weights, parameter_shapes
from danlu.runs.prepare import check_weights
from danlu.spec import Model, Moe, SpecError
from danlu.spec.load import load_model, load_recipe, read_recipe
from danlu.storage.checkpoint.safetensors_io import SafetensorsReader

RECIPE = """name = "tuned"
steps = 1
weights = "{weights}"

[data]
shards = "shards"

[batch]
sequences = 4
length = 16
"""


@pytest.fixture(scope="module", params=list(MODELS))
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Model]:
    """A model of transformers, its import, and the shape found."""
    folder = tmp_path_factory.mktemp("hf")
    source = make_hf(folder / "source", request.param)
    return source, folder / "out", import_hf(source, folder / "out").model


def _reader(folder: Path) -> Callable[[str], torch.Tensor]:
    return SafetensorsReader(folder, WEIGHTS_FILE_PREFIX).read


def _same_tensors(one: SafetensorsReader, other: SafetensorsReader) -> bool:
    return one.names == other.names and all(
        one.dtype(name) == other.dtype(name) and torch.equal(one.read(name), other.read(name)) for name in one.names
    )


@pytest.fixture(scope="module")
def differences(report: Callable[[dict[str, Any]], None]) -> Iterator[dict[str, float]]:
    """The largest difference of a logit, model by model; a report when all have been compared."""
    found: dict[str, float] = {}
    yield found
    if found.keys() == MODELS.keys():
        report({"bar": LOGIT_TOLERANCE, "models": len(found), "worst": max(found.values()), "by model": found})


def test_logits_are_those_of_transformers(
    imported: tuple[Path, Path, Model], request: pytest.FixtureRequest, differences: dict[str, float]
) -> None:
    source, output, model = imported
    found = compare_logits(source, model, lambda: load_imported_decoder(output, model))
    differences[request.node.callspec.params["imported"]] = found.max_difference
    assert found.tokens >= 512
    assert found.max_difference <= LOGIT_TOLERANCE
    assert found.top1_agreement > 0.99


def test_a_wrong_trait_would_show(tmp_path: Path) -> None:
    source = make_hf(tmp_path / "source", "llama, long context")
    model = import_hf(source, tmp_path / "out").model
    for change in ({"rope_scaling": None}, {"rope_theta": 20_000.0}, {"norm_epsilon": 1e-2}):
        other = model.model_copy(update=change)
        assert (
            compare_logits(
                source, other, lambda other=other: load_imported_decoder(tmp_path / "out", other)
            ).max_difference
            > LOGIT_TOLERANCE
        )


def test_out_and_in_again_is_the_same_to_the_bit(imported: tuple[Path, Path, Model], tmp_path: Path) -> None:
    _, output, model = imported
    export_hf(model, _reader(output), tmp_path / "export", output)
    again = import_hf(tmp_path / "export", tmp_path / "again").model
    free = {"name", "source"}
    assert again.model_dump(exclude=free) == model.model_dump(exclude=free)
    assert _same_tensors(
        SafetensorsReader(output, WEIGHTS_FILE_PREFIX), SafetensorsReader(tmp_path / "again", WEIGHTS_FILE_PREFIX)
    )
    found = compare_logits(tmp_path / "export", model, lambda: load_decoder(model, _reader(output), torch.float32))
    assert found.max_difference <= LOGIT_TOLERANCE


def test_a_configuration_comes_back(imported: tuple[Path, Path, Model], tmp_path: Path) -> None:
    """What transformers understands of the exported configuration is what it understood of its own."""
    import transformers

    source, output, model = imported
    export_hf(model, _reader(output), tmp_path / "export", output)
    before, after = (transformers.AutoConfig.from_pretrained(path).to_dict() for path in (source, tmp_path / "export"))
    after["sliding_window"] = before.get("sliding_window")  # one as long as the model is none
    after["head_dim"] = before.get("head_dim") or after["head_dim"]
    before["head_dim"] = after["head_dim"]
    before.setdefault("sliding_window", None)
    for key in ("scoring_func", "topk_method", "moe_layer_freq"):  # of DeepSeek's own code, which other loaders read
        if key in after:
            before.setdefault(key, after[key])
    assert after | {"_name_or_path": ""} == before | {"_name_or_path": ""}


def test_the_tokenizer_and_the_original_configuration_come_along(tmp_path: Path) -> None:
    source = make_hf(tmp_path / "source", "qwen3")
    model = import_hf(source, tmp_path / "out").model
    export_hf(model, _reader(tmp_path / "out"), tmp_path / "export", tmp_path / "out")
    for name in ("tokenizer.json", "special_tokens_map.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
        assert (tmp_path / "export" / name).read_bytes() == (source / name).read_bytes()
    assert (tmp_path / "out" / "hf" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert json.loads((tmp_path / "export" / "config.json").read_text())["initializer_range"] == 0.02


@pytest.mark.parametrize("name", ["qwen2", "mixtral"])
def test_counts_are_those_of_the_files(name: str, tmp_path: Path) -> None:
    model = import_hf(make_hf(tmp_path / "source", name), tmp_path / "out").model
    weights = SafetensorsReader(tmp_path / "out", WEIGHTS_FILE_PREFIX)
    assert count_parameters(model) == sum(weights.read(name).numel() for name in weights.names)
    assert load_model(str(tmp_path / "out" / MODEL_FILE)) == model


def test_the_stacked_form_of_experts_is_read_too(tmp_path: Path) -> None:
    for name, saving in (("each", {}), ("stacked", {"save_original_format": False})):
        import_hf(make_hf(tmp_path / name, "mixtral", **saving), tmp_path / f"{name}-out")
    assert any(name.endswith("gate_up_proj") for name in SafetensorsReader(tmp_path / "stacked", "model").names)
    assert _same_tensors(
        SafetensorsReader(tmp_path / "each-out", WEIGHTS_FILE_PREFIX),
        SafetensorsReader(tmp_path / "stacked-out", WEIGHTS_FILE_PREFIX),
    )


def test_files_are_cut_and_keep_the_dtype(tmp_path: Path) -> None:
    source = make_hf(tmp_path / "source", "llama", torch.bfloat16, max_shard_size="20KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    model = import_hf(source, tmp_path / "out", shard_bytes=30_000).model
    files = sorted((tmp_path / "out").glob("weights-*.safetensors"))
    assert len(files) > 1 and max(file.stat().st_size for file in files) < 32_000
    weights = SafetensorsReader(tmp_path / "out", WEIGHTS_FILE_PREFIX)
    assert {weights.dtype(name) for name in weights.names} == {torch.bfloat16}
    found = compare_logits(source, model, lambda: load_imported_decoder(tmp_path / "out", model))
    assert found.max_difference <= LOGIT_TOLERANCE
    export_hf(model, _reader(tmp_path / "out"), tmp_path / "export", dtype="bf16")
    import_hf(tmp_path / "export", tmp_path / "again")
    assert _same_tensors(weights, SafetensorsReader(tmp_path / "again", WEIGHTS_FILE_PREFIX))


# --- what is refused


@pytest.mark.parametrize(
    ("name", "changes", "key", "says"),
    [
        ("llama", {"sliding_window": 128}, "sliding_window", "is 128, but Danlu's model has no window in this family"),
        ("qwen2", {"layer_types": ["full_attention"] * 3}, "layer_types", "has 3 layers, but num_hidden_layers is 2"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types", "only layers of type"),
        ("gpt-oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config", "no quantized weights"),
        ("gpt-oss", {"rope_parameters": None}, "rope_parameters", "is missing, and the family scales positions"),
        ("gpt-oss", {"swiglu_limit": 8.0}, "swiglu_limit", "is 8.0, but Danlu's model has only 7.0"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping", "is 50.0"),
        (
            "gemma3",
            {"layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"]},
            "layer_types",
            "full_attention in the first layers, and in the last of every so many others",
        ),
        ("llama", {"hidden_act": "gelu"}, "hidden_act", 'is "gelu", but Danlu\'s model has only "silu"'),
        (
            "llama",
            {"rope_parameters": LLAMA3 | {"rope_type": "yarn"}},
            "rope_parameters",
            "positions of type yarn without low_freq_factor, high_freq_factor",
        ),
        (
            "llama",
            {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_scaling",
            '"default", "linear", "llama3" and "yarn" only',
        ),
        ("llama", {"attention_bias": True}, "attention_bias", "together, or on neither"),
        ("llama", {"mlp_bias": True}, "mlp_bias", "together, or on neither"),
        ("qwen3", {"attention_bias": True}, "attention_bias", "none here"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor", "is 0.5, but Danlu's model has only 1.0"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config", "no support for it"),
        (
            "llama",
            {"model_type": "lama"},
            "model_type",
            "must be one of llama, mistral, qwen2, qwen3, mixtral, deepseek_v3, gemma2",
        ),
        ("llama", {"hidden_size": None}, "hidden_size", "is missing"),
        ("llama", {"num_key_value_heads": 3}, "file", "`kv_heads` must divide `heads`"),
    ],
)
def test_what_cannot_be_computed_is_refused(
    name: str, changes: dict[str, Any], key: str, says: str, tmp_path: Path
) -> None:
    source = make_hf(tmp_path / "source", name)
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=2))
    with pytest.raises(SpecError) as refused:
        import_hf(source, tmp_path / "out")
    (problem,) = refused.value.problems
    assert problem.key == key and says in problem.message
    assert problem.file == str(path)
    assert not list(tmp_path.glob("out*"))


def test_a_key_that_is_not_known_is_named(tmp_path: Path) -> None:
    source = make_hf(tmp_path / "source")
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quirk": 3}))
    result = CliRunner().invoke(app, ["import", "hf", str(source), "-o", str(tmp_path / "out"), "--no-compare"])
    assert result.exit_code == 0, result.output
    assert "ignored, because Danlu does not know it: quirk = 3" in result.stderr
    assert "comparison with transformers was not made, because of --no-compare" in result.stderr


def test_a_tensor_too_few_or_too_many_is_named_with_the_nearest(tmp_path: Path) -> None:
    source = make_hf(tmp_path / "source", max_shard_size="20KB")
    index = source / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = content["weight_map"]
    files["model.layers.0.mlp.up.weight"] = files.pop("model.layers.0.mlp.up_proj.weight")
    index.write_text(json.dumps(content))
    with pytest.raises(SpecError) as refused:
        import_hf(source, tmp_path / "out")
    missing, unexpected = refused.value.problems
    assert (missing.key, missing.message) == ("model.layers.0.mlp.up_proj.weight", "is missing")
    assert missing.suggestion == "did you mean `model.layers.0.mlp.up.weight`?"
    assert unexpected.key == "model.layers.0.mlp.up.weight"


LLAMA_LIKE = Model(vocabulary=96, layers=2, width=32, heads=4, sequence=64)


@pytest.mark.parametrize(
    ("changes", "trait"),
    [
        ({"norm": "layer"}, 'norm = "layer"'),
        ({"position": "learned"}, 'position = "learned"'),
        ({"activation": "gelu"}, 'activation = "gelu"'),
        ({"qkv_bias": True, "qk_norm": True}, "qkv_bias and qk_norm together"),
        ({"moe": Moe(experts=4, top_k=2, width=16, shared=1)}, "moe.shared = 1"),
        ({"moe": Moe(experts=4, top_k=2, width=16, balance="bias")}, 'moe.balance = "bias"'),
        ({"moe": Moe(experts=4, top_k=2, width=16), "qk_norm": True}, "qk_norm in an MoE model"),
    ],
)
def test_a_model_without_a_family_is_not_exported(changes: dict[str, Any], trait: str, tmp_path: Path) -> None:
    model = LLAMA_LIKE.model_copy(update=changes)
    with pytest.raises(SpecError, match=r"do(es)? not support") as refused:
        export_hf(model, lambda name: torch.zeros(()), tmp_path / "export")
    assert f"has {trait}, which" in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "architecture"),
    [
        ({}, "LlamaForCausalLM"),
        ({"bias": True}, "LlamaForCausalLM"),
        ({"qkv_bias": True}, "Qwen2ForCausalLM"),
        ({"qk_norm": True, "head_width": 16}, "Qwen3ForCausalLM"),
        ({"moe": Moe(experts=4, top_k=2, width=16)}, "MixtralForCausalLM"),
    ],
)
def test_a_model_from_scratch_is_exported_by_its_traits(
    changes: dict[str, Any], architecture: str, tmp_path: Path
) -> None:
    model = LLAMA_LIKE.model_copy(update=changes)
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in parameter_shapes(model).items()}
    family = export_hf(model, tensors.__getitem__, tmp_path / "export")
    assert family.architecture == architecture
    found = compare_logits(tmp_path / "export", model, lambda: load_decoder(model, tensors.__getitem__, torch.float32))
    assert found.max_difference <= LOGIT_TOLERANCE


# --- a recipe that starts from weights


def test_a_recipe_takes_the_model_of_its_weights(tmp_path: Path) -> None:
    model = import_hf(make_hf(tmp_path / "source", "mixtral"), tmp_path / "out").model
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(weights="out"))
    assert load_recipe(path).model == model
    path.write_text(RECIPE.format(weights="out") + '[model]\nsequence = 64\n[model.moe]\nbalance = "none"\n')
    changed = load_recipe(path).model
    assert changed.sequence == 64 and changed.moe is not None and changed.moe.balance == "none"
    assert changed.moe.experts == 4
    path.write_text(RECIPE.format(weights="elsewhere"))
    with pytest.raises(SpecError, match="danlu import hf DIR -o"):
        load_recipe(path)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    model = import_hf(make_hf(tmp_path / "source"), tmp_path / "out").model
    other = model.model_copy(update={"qk_norm": True, "mlp_width": 64})
    with pytest.raises(SpecError) as refused:
        load_weights([], other, tmp_path / "out")
    text = str(refused.value)
    assert "blocks.0.attention.q_norm.weight: is missing" in text
    assert "blocks.1.mlp.up.weight: has shape [48, 32], but the model needs [64, 32]" in text


def test_the_command_prints_the_comparison(tmp_path: Path) -> None:
    source = make_hf(tmp_path / "source", "qwen2")
    command = ["import", "hf", str(source), "-o", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["compared"] and figures["good"] and figures["tokens"] >= 512
    assert figures["max_difference"] <= figures["tolerance"] == LOGIT_TOLERANCE
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, SpecError) and "exists already" in str(result.exception)
    strict = CliRunner().invoke(app, ["import", "hf", str(source), "-o", str(tmp_path / "strict"), "--tolerance", "0"])
    assert (strict.exit_code == 1) == (figures["max_difference"] > 0)
    assert "max |Δ| of logits" in strict.stdout


def test_without_transformers_the_command_says_what_was_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_hf(tmp_path / "source")
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = CliRunner().invoke(app, ["import", "hf", str(source), "-o", str(tmp_path / "out"), "--json"])
    assert result.exit_code == 0, result.output
    (line,) = result.stderr.splitlines()
    assert "comparison with transformers was not made" in line and "pip install 'danlu[hf]'" in line
    assert json.loads(result.stdout)["compared"] is False


def test_a_recipe_may_not_change_what_the_weights_mean(tmp_path: Path) -> None:
    import_hf(make_hf(tmp_path / "source", "llama, long context"), tmp_path / "out")
    path = tmp_path / "recipe.toml"

    def check(table: str) -> None:
        path.write_text(RECIPE.format(weights=tmp_path / "out") + table)
        check_weights(read_recipe(path))

    check("[model]\nsequence = 64\n")
    with pytest.raises(SpecError) as refused:
        check("[model]\nrope_theta = 500000.0\n")
    (problem,) = refused.value.problems
    assert problem.key == "model.rope_theta" and problem.message.startswith("is 500000.0, but 10000.0 in")
    assert path.read_text().splitlines()[problem.line - 1] == "rope_theta = 500000.0"


def test_a_run_and_its_step() -> None:
    assert parse_run_step("tuned") == ("tuned", None)
    assert parse_run_step("runs/tuned@20") == ("runs/tuned", 20)
    assert choose_step("tuned", None, [10, 20]) == 20
    assert choose_step("tuned", 10, [10, 20]) == 10
    with pytest.raises(SpecError, match=r"no checkpoint of step 15; saved are \[10, 20\]"):
        choose_step("tuned", 15, [10, 20])
    with pytest.raises(SpecError, match="has no complete checkpoint"):
        choose_step("tuned", None, [])
    with pytest.raises(SpecError, match='has "last" for its step'):
        parse_run_step("tuned@last")


def test_old_tables_of_positions_are_no_error_and_a_tied_head_must_be_the_embedding(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = make_hf(tmp_path / "source", "llama tied")
    file = source / "model.safetensors"
    tensors = load_file(file)
    tensors |= {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(20)}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file)
    import_hf(source, tmp_path / "out")
    tensors["lm_head.weight"] += 1
    save_file(tensors, file)
    with pytest.raises(SpecError, match="differs from the embedding"):
        import_hf(source, tmp_path / "again")


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = make_hf(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(SpecError, match="is stored as I8, but must be one of F64, F32, BF16, F16"):
        import_hf(source, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bias": True, "qkv_bias": True}, "`qkv_bias` must be false"),
        ({"position": "learned", "rope_scaling": {"factor": 8.0, "original": 64}}, '`position` must be "rope"'),
        ({"rope_scaling": {"factor": 8.0, "original": 64, "low": 4.0, "high": 4.0}}, "`high` must be above `low`"),
    ],
)
def test_traits_that_contradict_each_other(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Model.model_validate(LLAMA_LIKE.model_dump() | changes)
